// A CUDA driver without a device, for tests: it runs the kernels on the host.
//
// An operation runs as late as the order of streams, events and waits allows: when something waits
// for it. A seed gives each stream a rank. When an operation has to run, the streams of a higher
// rank run first what their order allows. So an order that the caller forgot to ask for is wrong
// each time, and not by chance: with seed 0 if an operation must not run late, and with another
// seed if it must not run early. Fresh memory is 0xCD, and freed memory 0xDD. Only the functions
// that `kernels` calls are here.
//
// Tests tell the driver what to be (`fake_devices`, `fake_version`, `fake_pools`, `fake_break`),
// which seed to use (`fake_seed`), which order to forget (`fake_mutate`), and which call fails
// (`fake_fail`). Other processes are told by the environment: `EBB_TEST_SEED`, and
// `EBB_TEST_FAIL=cuLaunchKernel:40:700` for the call of this number, from 0 on, and its error. They
// ask what was called (`fake_count`, `fake_called`), and which kernels have not run yet (`fake_waiting`).
//
// Memory that is exported lies in a file without a name from then on. Its handle names the process
// and the descriptor, and a process of this user opens the file through `/proc`. So exported memory
// outlives its process while another one has it open. NVIDIA does not say so of a real driver.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "host.hpp"

#define DRIVER extern "C" __attribute__((visibility("default")))

typedef unsigned long long Pointer;
enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    PEER_ACCESS_UNSUPPORTED = 217,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ALREADY_REGISTERED = 712,
};

// An order that the driver forgets. A place where there is nothing to wait for does not count.
enum Mutation {
    NOTHING,
    // A wait of the host or of a stream, or the record of an event, does nothing. A stream that does
    // not wait runs its next operation at once.
    JOIN,
    // A kernel, a copy or a free runs at once, and not after the operations of its stream that use
    // the same memory.
    EARLY,
    // A kernel or a copy runs after everything that should have waited for it.
    LATE,
    MUTATIONS,
};

static Mutation MUTATION = NOTHING;
static long TARGET = -1;
static long COUNTED[MUTATIONS];

// Counts a place of a mutation. Returns whether it is the place.
static bool mutates(Mutation mutation) { return COUNTED[mutation]++ == TARGET && MUTATION == mutation; }

// What the next kernel that runs fails with, and what one has failed with.
static int BREAKS = SUCCESS;
static int BROKEN = SUCCESS;

// What a caller did that no driver allows.
static const char* HARM = nullptr;
// Nothing is done to a device that is broken.
static void harm(const char* what) {
    if (BROKEN == SUCCESS) {
        HARM = what;
    }
}

static const char* const FREED_EARLIER = "memory was used after it was freed";
static const char* const FREED_TOO_EARLY = "memory was freed before an operation had used it";

struct Stream;

// The end of what a stream had been told when the event was recorded.
struct Event {
    Stream* stream = nullptr;
    unsigned long long until = 0;
    // A mutation forgot to record it.
    bool is_forgotten = false;

    bool is_there() const;
};

// Memory that an operation uses.
struct Range {
    Pointer begin;
    Pointer end;
    // The address of the allocation on the device, or 0 for memory of the host.
    Pointer block;

    bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// What a caller asked for since `fake_count`.
enum Call {
    // A kernel.
    LAUNCH,
    // The host waits for the device.
    WAIT,
    // Memory of the device, or page-locked memory of the host.
    ALLOCATION,
    // A byte of the host that is copied to the device.
    UPLOADED_BYTE,
    CALLS,
};
static long CALLED[CALLS];

// An operation that has not run yet.
struct Operation {
    std::function<void()> run;
    // What is left of it if the host no longer waits for it: an upload finds other values in the
    // host's memory, and a download comes too late.
    std::function<void()> abandoned;
    std::vector<Range> used;
    // The module of a kernel.
    const std::string* module = nullptr;
    // What the stream waits for.
    Event awaited = {};
    bool is_free = false;

    void perform() const;

    bool uses(const Range& range) const {
        return std::any_of(used.begin(), used.end(), [&](const Range& other) { return range.meets(other); });
    }
};

static void run(Stream* stream, unsigned long long until);

// Operations that have not run yet, and the number of those that were ever queued and that ran.
struct Stream {
    std::deque<Operation> waiting;
    unsigned long long queued = 0;
    unsigned long long ran = 0;
    // The stream with the highest rank goes first.
    unsigned long long rank = 0;
    // It was not told to wait, so its next operation runs at once.
    bool hurries = false;

    // Queues a kernel or a copy, unless a mutation is at this place.
    void queue(Operation operation) {
        if (is_early(operation)) {
            return operation.perform();
        }
        if (mutates(LATE)) {
            return;
        }
        push(std::move(operation));
    }

    bool is_early(const Operation& operation) const {
        const auto uses = [&](const Range& range) { return uses_later(range); };
        return std::any_of(operation.used.begin(), operation.used.end(), uses) && mutates(EARLY);
    }

    void push(Operation operation) {
        waiting.push_back(std::move(operation));
        ++queued;
        if (hurries) {
            hurries = false;
            ::run(this, queued);
        }
    }

    // Returns whether there is an operation whose event has come.
    bool is_ready() const { return !waiting.empty() && waiting.front().awaited.is_there(); }

    // Runs the next operation.
    void step() {
        const Operation operation = std::move(waiting.front());
        waiting.pop_front();
        ++ran;
        if (operation.module != nullptr && BREAKS != SUCCESS) {
            BROKEN = BREAKS;
            BREAKS = SUCCESS;
        }
        // A broken device neither computes nor copies.
        if (operation.is_free || BROKEN == SUCCESS) {
            operation.perform();
        }
    }

    bool has_kernels_of(const std::string* module) const {
        const auto is_of = [=](const Operation& operation) { return operation.module == module; };
        return std::any_of(waiting.begin(), waiting.end(), is_of);
    }

    // Returns whether an operation that has not run yet uses memory.
    bool uses_later(const Range& range) const {
        const auto uses = [&](const Operation& operation) { return operation.uses(range); };
        return std::any_of(waiting.begin(), waiting.end(), uses);
    }

    void abandon() {
        for (Operation& operation : waiting) {
            if (operation.abandoned) {
                operation.run = operation.abandoned;
            }
        }
    }
};

bool Event::is_there() const { return stream == nullptr || stream->ran >= until; }

// Streams that were not destroyed.
// Containers are never destroyed: threads may call the driver while their process ends.
static std::vector<Stream*>& STREAMS = *new std::vector<Stream*>;

// Runs the operations of a stream up to this number, and as few others as their order and the ranks
// demand.
static void run(Stream* stream, unsigned long long until) {
    while (stream->ran < until) {
        Stream* next = stream;
        while (!next->is_ready()) {
            next = next->waiting.front().awaited.stream;
        }
        for (Stream* other : STREAMS) {
            if (other->is_ready() && other->rank > next->rank) {
                next = other;
            }
        }
        next->step();
    }
}

// Returns whether an operation of any stream that has not run yet uses memory.
static bool is_used_later(const Range& range) {
    const auto uses = [&](const Stream* stream) { return stream->uses_later(range); };
    return std::any_of(STREAMS.begin(), STREAMS.end(), uses);
}

// Memory of the device.
struct Block {
    std::size_t bytes = 0;
    // It was mapped, and not allocated in the order of a stream. Only such memory can be exported.
    bool is_mapped = false;
    // The descriptor of the file in which exported memory lies, or -1.
    int file = -1;
    // How often this process has opened it, if another process exported it.
    int opened = 0;
    // The number of the file that was opened.
    unsigned long long inode = 0;
};

// What is in a handle of exported memory.
struct Exported {
    unsigned long long magic;
    unsigned long long inode;
    unsigned long long bytes;
    int process;
    int file;
    int device;
};

struct Handle {
    char reserved[64];
};
static_assert(sizeof(Exported) <= sizeof(Handle), "a handle has 64 bytes");
static const unsigned long long MAGIC = 0x6562626c65697063;

static std::recursive_mutex LOCK;
static std::map<Pointer, Block>& MEMORY = *new std::map<Pointer, Block>;
// Memory that the caller has given up, with its bytes, until others may get it.
static std::map<Pointer, std::size_t>& GIVEN_UP = *new std::map<Pointer, std::size_t>;
// Addresses of freed memory.
static std::set<Pointer>& FREE = *new std::set<Pointer>;
// Freed memory. It keeps its pattern for a while, so that a late reader finds the pattern.
static std::deque<std::pair<char*, Block>>& FREED = *new std::deque<std::pair<char*, Block>>;
// Page-locked memory of the host, with its bytes.
static std::map<Pointer, std::size_t>& PINNED = *new std::map<Pointer, std::size_t>;
static std::size_t FREED_BYTES = 0;
static const std::size_t FREED_MAX = std::size_t(1) << 27;
static std::size_t USED = 0;
// Programs that load the driver by its name say so through the environment.
static long said(const char* name, long otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atol(text);
}
static std::size_t TOTAL = said("EBB_TEST_DEVICE_BYTES", 1L << 26);
static int DEVICES = said("EBB_TEST_DEVICES", 1);
static int VERSION = said("EBB_TEST_DRIVER_VERSION", 13000);
static int POOLS = 1;
// What ranks of streams depend on, and the number of the next stream since it was set.
static unsigned long long SEED = said("EBB_TEST_SEED", 0);
static unsigned long long NUMBER = 0;
// Whether a process may open memory that it has exported itself.
static bool IS_OWN_OPENED = false;
// What calls that pass memory between processes fail with.
static const int IPC = said("EBB_TEST_IPC", SUCCESS);
// Whether all devices have access to each other's memory.
static const bool PEERS = said("EBB_TEST_PEERS", 0) != 0;
static thread_local void* CURRENT = nullptr;
// The contexts of devices.
static char CONTEXTS[64];

static bool is_context(const void* context) { return context >= CONTEXTS && context < CONTEXTS + sizeof(CONTEXTS); }

// Returns the device whose context is current. -1: none.
static int current_device() {
    return is_context(CURRENT) ? int(static_cast<const char*>(CURRENT) - CONTEXTS) : -1;
}

#define LOCKED std::lock_guard<std::recursive_mutex> locked(LOCK)

void Operation::perform() const {
    const auto is_free = [](const Range& range) { return FREE.count(range.block) > 0; };
    if (std::any_of(used.begin(), used.end(), is_free)) {
        harm(FREED_EARLIER);
    }
    run();
}

// Returns the allocation in which an address lies: where it begins, and its bytes. 0: in none.
template <class Value>
static std::pair<Pointer, std::size_t> found_in(const std::map<Pointer, Value>& blocks, Pointer address) {
    auto block = blocks.upper_bound(address);
    if (block == blocks.begin()) {
        return {0, 0};
    }
    --block;
    std::size_t bytes;
    if constexpr (std::is_same_v<Value, Block>) {
        bytes = block->second.bytes;
    } else {
        bytes = block->second;
    }
    return address - block->first < bytes ? std::make_pair(block->first, bytes) : std::make_pair(0ULL, 0UL);
}

// Returns the memory of the device that lies at an address, to the end of its allocation. `block` is
// 0: there is none.
static Range on_device(Pointer address) {
    const auto [block, bytes] = found_in(MEMORY, address);
    if (block == 0 && found_in(GIVEN_UP, address).first != 0) {
        harm(FREED_EARLIER);
    }
    return {address, block + bytes, block};
}

// Returns so many bytes of the device at an address.
static Range on_device(Pointer address, std::size_t bytes) {
    const Range range = on_device(address);
    if (range.block != 0 && address + bytes > range.end) {
        harm("memory was used beyond its end");
    }
    return {address, address + bytes, range.block};
}

static Range on_host(const void* address, std::size_t bytes) {
    const Pointer begin = reinterpret_cast<Pointer>(address);
    return {begin, begin + bytes, 0};
}

// Calls of a function that fail.
struct Failing {
    std::string function;
    // The first of them, from 0 on, and how many.
    long first = 0;
    long count = 1;
    int error = SUCCESS;
};

static Failing failing() {
    const char* text = std::getenv("EBB_TEST_FAIL");
    Failing failing;
    if (text != nullptr) {
        const std::string words(text);
        const std::size_t name = words.find(':'), number = words.find(':', name + 1);
        failing.function = words.substr(0, name);
        failing.first = std::stol(words.substr(name + 1));
        failing.error = std::stoi(words.substr(number + 1));
    }
    return failing;
}
static Failing& FAILING = *new Failing(failing());
static std::map<std::string, long>& NUMBERS = *new std::map<std::string, long>;

// Counts a call. Returns what it fails with. Only a lack of memory leaves the device as it was.
static int fails(const char* function) {
    const long number = NUMBERS[function]++;
    if (BROKEN == SUCCESS && FAILING.function == function && number >= FAILING.first &&
        number < FAILING.first + FAILING.count) {
        if (FAILING.error == OUT_OF_MEMORY) {
            return OUT_OF_MEMORY;
        }
        BROKEN = FAILING.error;
    }
    return BROKEN;
}

// A driver whose device is broken refuses everything.
#define WORKING \
    LOCKED; \
    if (const int error = fails(__func__); error != SUCCESS) { \
        return Result(error); \
    }

// Sets how many devices there are.
DRIVER void fake_devices(int count) { DEVICES = count; }

// Sets the memory of the device.
DRIVER void fake_memory(std::size_t bytes) { TOTAL = bytes; }

// Sets the version of CUDA, such as 12040 for 12.4.
DRIVER void fake_version(int version) { VERSION = version; }

// Sets whether the device allocates in the order of a stream.
DRIVER void fake_pools(int supported) { POOLS = supported; }

// Lets the next kernel that runs fail, and all later calls with it. 0: the device works again.
DRIVER void fake_break(int error) {
    LOCKED;
    BREAKS = error;
    BROKEN = SUCCESS;
}

// Gives streams that are made from now on other ranks. 0: all have the same.
DRIVER void fake_seed(unsigned long long seed) {
    LOCKED;
    SEED = seed;
    NUMBER = 0;
}

// Sets whether this process may open memory that it has exported itself. No real driver allows it.
DRIVER void fake_own(int opened) { IS_OWN_OPENED = opened != 0; }

// Lets calls of a function fail, counted from 0 and from this call. The device works until then.
DRIVER void fake_fail(const char* function, long first, long count, int error) {
    LOCKED;
    FAILING = {function, first, count, error};
    BROKEN = SUCCESS;
    NUMBERS.clear();
}

// Returns the number of calls of a function since then.
DRIVER long fake_calls(const char* function) {
    LOCKED;
    return NUMBERS[function];
}

// Forgets an order at one of its places, counted from 0 and from this call.
DRIVER void fake_mutate(int mutation, long target) {
    LOCKED;
    MUTATION = Mutation(mutation);
    TARGET = target;
    HARM = nullptr;
    std::fill(COUNTED, COUNTED + MUTATIONS, 0);
}

// Returns what the caller did that no driver allows, since the last call of `fake_mutate`, or null.
DRIVER const char* fake_harm() {
    LOCKED;
    return HARM;
}

// Returns the number of places of a mutation since then.
DRIVER long fake_counted(int mutation) {
    LOCKED;
    return COUNTED[mutation];
}

// Counts calls from 0 again.
DRIVER void fake_count() {
    LOCKED;
    std::fill(CALLED, CALLED + CALLS, 0);
}

// Returns the number of calls of a kind since then.
DRIVER long fake_called(int call) {
    LOCKED;
    return CALLED[call];
}

// Returns the number of kernels that have not run yet.
DRIVER long fake_waiting() {
    LOCKED;
    const auto is_kernel = [](const Operation& operation) { return operation.module != nullptr; };
    long waiting = 0;
    for (const Stream* stream : STREAMS) {
        waiting += std::count_if(stream->waiting.begin(), stream->waiting.end(), is_kernel);
    }
    return waiting;
}

DRIVER Result cuInit(unsigned) { return DEVICES > 0 ? SUCCESS : NO_DEVICE; }

DRIVER Result cuDriverGetVersion(int* version) {
    *version = VERSION;
    return SUCCESS;
}

DRIVER Result cuDeviceGetCount(int* count) {
    *count = DEVICES;
    return SUCCESS;
}

DRIVER Result cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < DEVICES ? SUCCESS : INVALID_DEVICE;
}

DRIVER Result cuDeviceGetName(char* name, int length, int) {
    std::strncpy(name, "a host that plays a device", length);
    return SUCCESS;
}

DRIVER Result cuDeviceTotalMem_v2(std::size_t* bytes, int) {
    *bytes = TOTAL;
    return SUCCESS;
}

// `nvml.cpp` has the same numbers.
DRIVER Result cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    std::memset(uuid, 0, 16);
    uuid[15] = (unsigned char)device;
    return SUCCESS;
}

DRIVER Result cuDeviceGetPCIBusId(char* address, int length, int device) {
    std::snprintf(address, length, "0000:%02X:00.0", 0xA0 + device);
    return SUCCESS;
}

DRIVER Result cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 75:  // The major number of the compute capability.
            *value = 8;
            return SUCCESS;
        case 76:  // The minor number.
            *value = 0;
            return SUCCESS;
        case 115:  // Memory that is allocated in the order of a stream.
            *value = POOLS;
            return SUCCESS;
        default:
            return INVALID_VALUE;
    }
}

DRIVER Result cuDevicePrimaryCtxRetain(void** context, int device) {
    if (device < 0 || device >= int(sizeof(CONTEXTS))) {
        return INVALID_VALUE;
    }
    *context = &CONTEXTS[device];
    return SUCCESS;
}

DRIVER Result cuDeviceCanAccessPeer(int* can, int device, int other) {
    *can = PEERS && device != other;
    return SUCCESS;
}

DRIVER Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

DRIVER Result cuCtxGetCurrent(void** context) {
    *context = CURRENT;
    return SUCCESS;
}

DRIVER Result cuCtxSetCurrent(void* context) {
    CURRENT = context;
    return SUCCESS;
}

DRIVER Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    LOCKED;
    *free = TOTAL - USED;
    *total = TOTAL;
    return SUCCESS;
}

// A real driver has an order between contexts and streams that nothing here relies on.
DRIVER Result cuCtxSynchronize() {
    LOCKED;
    ++CALLED[WAIT];
    return SUCCESS;
}

// Returns a number that seems random, always the same for a seed and a stream.
static unsigned long long rank(unsigned long long seed, unsigned long long number) {
    unsigned long long mixed = (seed << 32 | number) * 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
}

DRIVER Result cuStreamCreate(Stream** stream, unsigned) {
    WORKING;
    *stream = new Stream;
    (*stream)->rank = SEED == 0 ? 0 : rank(SEED, NUMBER++);
    STREAMS.push_back(*stream);
    return SUCCESS;
}

DRIVER Result cuStreamSynchronize(Stream* stream) {
    WORKING;
    ++CALLED[WAIT];
    if (!stream->waiting.empty() && mutates(JOIN)) {
        stream->abandon();
        return SUCCESS;
    }
    run(stream, stream->queued);
    return Result(BROKEN);
}

// An event may still name the stream, so it stays.
DRIVER Result cuStreamDestroy_v2(Stream* stream) {
    LOCKED;
    run(stream, stream->queued);
    STREAMS.erase(std::remove(STREAMS.begin(), STREAMS.end(), stream), STREAMS.end());
    return SUCCESS;
}

DRIVER Result cuEventCreate(void** event, unsigned) {
    WORKING;
    *event = new Event;
    return SUCCESS;
}

DRIVER Result cuEventDestroy_v2(Event* event) {
    delete event;
    return SUCCESS;
}

DRIVER Result cuEventRecord(Event* event, Stream* stream) {
    WORKING;
    if (!stream->waiting.empty() && mutates(JOIN)) {
        event->is_forgotten = true;
        return SUCCESS;
    }
    *event = Event{stream, stream->queued, false};
    return SUCCESS;
}

DRIVER Result cuEventSynchronize(Event* event) {
    WORKING;
    ++CALLED[WAIT];
    if (event->stream == nullptr || (event->until > event->stream->ran && mutates(JOIN))) {
        return SUCCESS;
    }
    run(event->stream, event->until);
    return Result(BROKEN);
}

// A wait for an event that was never recorded waits for nothing.
DRIVER Result cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    WORKING;
    if (event->is_forgotten || (!event->is_there() && mutates(JOIN))) {
        stream->hurries = true;
    } else if (event->stream != nullptr) {
        stream->push({[] {}, nullptr, {}, nullptr, *event});
    }
    return SUCCESS;
}

// Maps memory, of a file or without one, at an address or anywhere. Returns null if it cannot.
static char* map(void* at, std::size_t bytes, int file) {
    const int flags = (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | (at == nullptr ? 0 : MAP_FIXED);
    void* memory = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

static Result allocate(Pointer* pointer, std::size_t bytes, bool is_mapped) {
    ++CALLED[ALLOCATION];
    if (bytes == 0) {
        return INVALID_VALUE;
    }
    if (USED + bytes > TOTAL) {
        return OUT_OF_MEMORY;
    }
    char* memory = is_mapped ? map(nullptr, bytes, -1) : new char[bytes];
    if (memory == nullptr) {
        return OUT_OF_MEMORY;
    }
    std::memset(memory, 0xCD, bytes);
    *pointer = reinterpret_cast<Pointer>(memory);
    Block block;
    block.bytes = bytes;
    block.is_mapped = is_mapped;
    MEMORY[*pointer] = block;
    FREE.erase(*pointer);
    USED += bytes;
    return SUCCESS;
}

// Keeps freed memory for a while, with the pattern of freed memory.
static void bury(Pointer pointer, const Block& block) {
    char* memory = reinterpret_cast<char*>(pointer);
    std::memset(memory, 0xDD, block.bytes);
    FREE.insert(pointer);
    FREED.emplace_back(memory, block);
    FREED_BYTES += block.bytes;
    while (FREED_BYTES > FREED_MAX) {
        const auto [oldest, of] = FREED.front();
        FREED_BYTES -= of.bytes;
        GIVEN_UP.erase(reinterpret_cast<Pointer>(oldest));
        if (of.is_mapped) {
            munmap(oldest, of.bytes);
        } else {
            delete[] oldest;
        }
        FREED.pop_front();
    }
}

static Result release(Pointer pointer, std::function<void()>* operation) {
    const auto found = MEMORY.find(pointer);
    if (found == MEMORY.end() || found->second.opened > 0) {
        return INVALID_VALUE;
    }
    const Block block = found->second;
    MEMORY.erase(found);
    GIVEN_UP[pointer] = block.bytes;
    *operation = [=] {
        USED -= block.bytes;
        // A process that has exported memory open finds the pattern too.
        bury(pointer, block);
        if (block.file >= 0) {
            close(block.file);
        }
    };
    return SUCCESS;
}

// The memory is there at once. What it holds is written in the order of the stream.
DRIVER Result cuMemAllocAsync(Pointer* pointer, std::size_t bytes, Stream* stream) {
    WORKING;
    const Result result = allocate(pointer, bytes, false);
    if (result == SUCCESS) {
        const Pointer memory = *pointer;
        const auto write = [=] { std::memset(reinterpret_cast<void*>(memory), 0xCD, bytes); };
        stream->push({write, nullptr, {on_device(memory, bytes)}});
    }
    return result;
}

DRIVER Result cuMemFreeAsync(Pointer pointer, Stream* stream) {
    WORKING;
    Operation operation;
    operation.used = {on_device(pointer)};
    operation.is_free = true;
    const Result result = release(pointer, &operation.run);
    if (result == SUCCESS && stream->is_early(operation)) {
        operation.run();
    } else if (result == SUCCESS) {
        stream->push(std::move(operation));
    }
    return result;
}

DRIVER Result cuMemAlloc_v2(Pointer* pointer, std::size_t bytes) {
    WORKING;
    return allocate(pointer, bytes, true);
}

// Waits for nothing.
DRIVER Result cuMemFree_v2(Pointer pointer) {
    WORKING;
    if (is_used_later(on_device(pointer))) {
        harm(FREED_TOO_EARLY);
    }
    std::function<void()> operation;
    const Result result = release(pointer, &operation);
    if (result == SUCCESS) {
        operation();
    }
    return result;
}

// Moves memory to a file without a name, at the address that it has.
static bool move_to_file(Pointer pointer, Block* block) {
    const int file = memfd_create("device", MFD_CLOEXEC);
    if (file < 0) {
        return false;
    }
    char* memory = reinterpret_cast<char*>(pointer);
    const bool is_written = write(file, memory, block->bytes) == static_cast<ssize_t>(block->bytes);
    if (!is_written || map(memory, block->bytes, file) == nullptr) {
        close(file);
        return false;
    }
    block->file = file;
    return true;
}

// A real driver refuses memory that was allocated in the order of a stream, too.
DRIVER Result cuIpcGetMemHandle(Handle* handle, Pointer pointer) {
    WORKING;
    if (IPC != SUCCESS) {
        return Result(IPC);
    }
    const auto found = MEMORY.find(pointer);
    if (found == MEMORY.end() || !found->second.is_mapped || found->second.opened > 0) {
        return INVALID_VALUE;
    }
    Block& block = found->second;
    struct stat status;
    if ((block.file < 0 && !move_to_file(pointer, &block)) || fstat(block.file, &status) != 0) {
        return OUT_OF_MEMORY;
    }
    const Exported exported = {MAGIC, status.st_ino, block.bytes, getpid(), block.file, current_device()};
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &exported, sizeof(exported));
    return SUCCESS;
}

// Memory that this process has opened already stays where it is.
DRIVER Result cuIpcOpenMemHandle_v2(Pointer* pointer, Handle handle, unsigned flags) {
    WORKING;
    if (IPC != SUCCESS) {
        return Result(IPC);
    }
    Exported exported;
    std::memcpy(&exported, &handle, sizeof(exported));
    if (exported.magic != MAGIC || flags != 1) {
        return INVALID_VALUE;
    }
    if (exported.process == getpid() && !IS_OWN_OPENED) {
        return INVALID_CONTEXT;
    }
    if (exported.device != current_device() && !PEERS) {
        return PEER_ACCESS_UNSUPPORTED;
    }
    const std::string path =
        "/proc/" + std::to_string(exported.process) + "/fd/" + std::to_string(exported.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) {
        return INVALID_HANDLE;
    }
    struct stat status;
    // Another file may have the number by now.
    if (fstat(file, &status) != 0 || status.st_ino != exported.inode ||
        static_cast<unsigned long long>(status.st_size) != exported.bytes) {
        close(file);
        return INVALID_HANDLE;
    }
    for (auto& [known, block] : MEMORY) {
        if (block.opened > 0 && block.inode == exported.inode) {
            close(file);
            ++block.opened;
            *pointer = known;
            return SUCCESS;
        }
    }
    char* memory = map(nullptr, exported.bytes, file);
    close(file);
    if (memory == nullptr) {
        return OUT_OF_MEMORY;
    }
    Block block;
    block.bytes = exported.bytes;
    block.is_mapped = true;
    block.opened = 1;
    block.inode = exported.inode;
    *pointer = reinterpret_cast<Pointer>(memory);
    MEMORY[*pointer] = block;
    FREE.erase(*pointer);
    return SUCCESS;
}

// Waits for nothing.
DRIVER Result cuIpcCloseMemHandle(Pointer pointer) {
    WORKING;
    const auto found = MEMORY.find(pointer);
    if (found == MEMORY.end() || found->second.opened == 0) {
        return INVALID_VALUE;
    }
    if (--found->second.opened > 0) {
        return SUCCESS;
    }
    if (is_used_later(on_device(pointer))) {
        harm(FREED_TOO_EARLY);
    }
    const Block block = found->second;
    MEMORY.erase(found);
    GIVEN_UP[pointer] = block.bytes;
    // The exporter's memory stays as it is: other memory has the pattern, at the same address.
    if (map(reinterpret_cast<void*>(pointer), block.bytes, -1) == nullptr) {
        return OUT_OF_MEMORY;
    }
    bury(pointer, block);
    return SUCCESS;
}

DRIVER Result cuMemGetAddressRange_v2(Pointer* base, std::size_t* bytes, Pointer pointer) {
    LOCKED;
    std::tie(*base, *bytes) = found_in(MEMORY, pointer);
    return *base == 0 ? INVALID_VALUE : SUCCESS;
}

// Memory of the host that copies may use late.
DRIVER Result cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
    WORKING;
    ++CALLED[ALLOCATION];
    *memory = std::malloc(bytes);
    PINNED[reinterpret_cast<Pointer>(*memory)] = bytes;
    return *memory == nullptr ? OUT_OF_MEMORY : SUCCESS;
}

DRIVER Result cuMemFreeHost(void* memory) {
    LOCKED;
    const auto found = PINNED.find(reinterpret_cast<Pointer>(memory));
    if (found == PINNED.end()) {
        return INVALID_VALUE;
    }
    const bool is_used = is_used_later(on_host(memory, found->second));
    PINNED.erase(found);
    if (is_used) {
        harm(FREED_TOO_EARLY);
    } else {
        std::free(memory);
    }
    return SUCCESS;
}

// Memory of somebody else, in whole pages.
DRIVER Result cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
    WORKING;
    const Pointer begin = reinterpret_cast<Pointer>(memory);
    if (bytes == 0 || begin % 4096 != 0) {
        return INVALID_VALUE;
    }
    const auto next = PINNED.lower_bound(begin);
    const bool overlaps_next = next != PINNED.end() && next->first < begin + bytes;
    const bool overlaps_last = next != PINNED.begin() && std::prev(next)->first + std::prev(next)->second > begin;
    if (overlaps_next || overlaps_last) {
        return ALREADY_REGISTERED;
    }
    PINNED[begin] = bytes;
    return SUCCESS;
}

DRIVER Result cuMemHostUnregister(void* memory) {
    WORKING;
    const auto found = PINNED.find(reinterpret_cast<Pointer>(memory));
    if (found == PINNED.end()) {
        return INVALID_VALUE;
    }
    if (is_used_later(on_host(memory, found->second))) {
        harm(FREED_TOO_EARLY);
    }
    PINNED.erase(found);
    return SUCCESS;
}

DRIVER Result cuMemsetD8Async(Pointer to, unsigned char value, std::size_t bytes, Stream* stream) {
    WORKING;
    const auto write = [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); };
    stream->push({write, nullptr, {on_device(to, bytes)}});
    return SUCCESS;
}

DRIVER Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, std::size_t bytes, Stream* stream) {
    WORKING;
    const auto copy = [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); };
    stream->queue({copy, nullptr, {on_device(to, bytes), on_device(from, bytes)}});
    return SUCCESS;
}

// Where the values of uploads that have not run lie, by the address to which they go.
static std::map<Pointer, const void*>& UPLOADS = *new std::map<Pointer, const void*>;

// The copy may read the host's memory as late as the stream is waited for, as from pinned memory.
DRIVER Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, std::size_t bytes, Stream* stream) {
    WORKING;
    CALLED[UPLOADED_BYTE] += bytes;
    UPLOADS[to] = from;
    const auto copy = [=] {
        UPLOADS.erase(to);
        std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    };
    const auto abandoned = [=] {
        UPLOADS.erase(to);
        std::memset(reinterpret_cast<void*>(to), 0xEE, bytes);
    };
    stream->queue({copy, abandoned, {on_device(to, bytes), on_host(from, bytes)}});
    return SUCCESS;
}

DRIVER Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, std::size_t bytes, Stream* stream) {
    WORKING;
    const auto copy = [=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); };
    stream->queue({copy, [] {}, {on_device(from, bytes), on_host(to, bytes)}});
    return SUCCESS;
}

// A module is the PTX: the names and parameters of its kernels are compared with those of the host.
DRIVER Result cuModuleLoadData(void** module, const void* image) {
    WORKING;
    const std::string ptx(static_cast<const char*>(image));
    // CUDA 12.4 reads PTX 8.4, and CUDA 13.0 reads PTX 9.0.
    const std::string word = ".version ";
    const std::size_t found = ptx.find(word);
    const double written = found == std::string::npos ? 0.0 : std::stod(ptx.substr(found + word.size()));
    const double known = VERSION / 1000 - 4 + VERSION % 1000 / 10 / 10.0;
    if (written > known + 0.01) {
        return UNSUPPORTED_PTX_VERSION;
    }
    *module = new std::string(ptx);
    return SUCCESS;
}

DRIVER Result cuModuleUnload(std::string* module) {
    LOCKED;
    const auto has_kernels = [=](const Stream* stream) { return stream->has_kernels_of(module); };
    if (std::any_of(STREAMS.begin(), STREAMS.end(), has_kernels)) {
        harm("kernels were unloaded before they had run");
    }
    delete module;
    return SUCCESS;
}

// Returns the bytes of each parameter of a kernel, as PTX declares them:
// `.param .u64 sum_param_0, .param .align 8 .b8 sgd_param_2[88]`.
static std::vector<std::size_t> parameters(const std::string& declared) {
    std::istringstream words(declared);
    std::vector<std::size_t> sizes;
    std::string word;
    while (words >> word) {
        if (word == ".align") {
            words >> word;
        } else if (word[0] == '.' && word != ".param") {
            // The type ends with its bits, such as `.f32`.
            sizes.push_back(std::stoul(word.substr(2)) / 8);
        } else if (const std::size_t many = word.find('['); many != std::string::npos) {
            sizes.back() *= std::stoul(word.substr(many + 1));
        }
    }
    return sizes;
}

// A kernel of a module.
struct Function {
    const Kernel* kernel;
    const std::string* module;
};

DRIVER Result cuModuleGetFunction(Function** function, const std::string* module, const char* name) {
    const std::string entry = std::string(".entry ") + name + "(";
    const std::size_t at = module->find(entry);
    const Kernel* const kernel = find(name);
    if (at == std::string::npos || kernel == nullptr) {
        return NOT_FOUND;
    }
    *function = new Function{kernel, module};
    const std::size_t begin = at + entry.size();
    const std::vector<std::size_t> sizes = parameters(module->substr(begin, module->find(')', begin) - begin));
    const std::size_t* const expected = kernel->sizes;
    const bool is_twin = std::equal(sizes.begin(), sizes.end(), expected, expected + kernel->parameters);
    return is_twin ? SUCCESS : INVALID_VALUE;
}

// The passes of a launch.
struct Table {
    Pointer at;
    unsigned count;

    // Returns the addresses in the table, or what will be in it once its upload has run. A table
    // that is longer than one upload shows the addresses of its first one.
    std::vector<Pointer> addresses(bool is_uploaded) const {
        const auto upload = UPLOADS.find(at);
        const bool waits = !is_uploaded && upload != UPLOADS.end();
        const char* passes = static_cast<const char*>(waits ? upload->second : reinterpret_cast<void*>(at));
        std::vector<Pointer> found;
        for (unsigned pass = 0; pass < count; ++pass) {
            // All but the length.
            Pointer words[sizeof(Operands) / sizeof(Pointer)];
            std::memcpy(words, passes + pass * sizeof(Pass<NoRule>), sizeof(words));
            found.insert(found.end(), std::begin(words) + 1, std::end(words));
        }
        return found;
    }

    // Returns whether all addresses lead to memory of the device, or to what was freed a while ago.
    bool is_legal() const {
        const auto leads = [](Pointer word) {
            return word == 0 || found_in(MEMORY, word).first != 0 || found_in(GIVEN_UP, word).first != 0;
        };
        const std::vector<Pointer> words = addresses(true);
        return std::all_of(words.begin(), words.end(), leads);
    }
};

// Returns the memory whose addresses are among the arguments. A kernel may use all that lies behind
// them.
static std::vector<Range> used_by(const Kernel* kernel, void** arguments) {
    std::vector<Range> used;
    for (std::size_t number = 0; number < kernel->parameters; ++number) {
        const char* argument = static_cast<const char*>(arguments[number]);
        const std::size_t bytes = kernel->has_addresses[number] ? kernel->sizes[number] : 0;
        for (std::size_t at = 0; at + sizeof(Pointer) <= bytes; at += sizeof(Pointer)) {
            Pointer word;
            std::memcpy(&word, argument + at, sizeof(word));
            const Range range = on_device(word);
            if (range.block != 0) {
                used.push_back(range);
            }
        }
    }
    return used;
}

DRIVER Result cuLaunchKernel(const Function* function, unsigned blocks, unsigned, unsigned, unsigned threads,
                             unsigned, unsigned, unsigned, Stream* stream, void** arguments, void**) {
    WORKING;
    ++CALLED[LAUNCH];
    if (!is_context(CURRENT) || blocks == 0 || threads == 0) {
        return INVALID_VALUE;
    }
    const Kernel* const kernel = function->kernel;
    std::vector<Range> used = used_by(kernel, arguments);
    std::function<void()> run = kernel->launch(blocks, threads, arguments);
    if (kernel->has_table) {
        const Table table = {*static_cast<Pointer*>(arguments[0]), *static_cast<unsigned*>(arguments[1])};
        for (Pointer word : table.addresses(false)) {
            const auto [block, bytes] = found_in(MEMORY, word);
            if (block != 0) {
                used.push_back({word, block + bytes, block});
            }
        }
        run = [launch = std::move(run), table] {
            if (table.is_legal()) {
                launch();
            } else {
                harm("a kernel found no table of passes");
            }
        };
    }
    stream->queue({std::move(run), nullptr, std::move(used), function->module});
    return SUCCESS;
}

DRIVER Result cuGetErrorName(Result, const char** text) {
    *text = "an error of the test's driver";
    return SUCCESS;
}

DRIVER Result cuGetErrorString(Result, const char** text) {
    *text = "an error of the test's driver";
    return SUCCESS;
}
