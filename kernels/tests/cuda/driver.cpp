// A CUDA driver without a device, for tests: it runs the kernels on the host.
//
// An operation runs as late as the order of streams, events and waits allows: when something waits
// for it. So an order that the caller forgot to ask for is wrong each time, and not by chance.
// Fresh memory is 0xCD, and freed memory 0xDD. Only the functions that `kernels` calls are here.

#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "host.hpp"

#define DRIVER extern "C" __attribute__((visibility("default")))

typedef unsigned long long Pointer;
enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_FOUND = 500,
};

// Operations that have not run yet, and the number of those that were ever queued and that ran.
struct Stream {
    std::deque<std::function<void()>> waiting;
    unsigned long long queued = 0;
    unsigned long long ran = 0;

    void queue(std::function<void()> operation) {
        waiting.push_back(std::move(operation));
        ++queued;
    }

    void run(unsigned long long until) {
        while (ran < until) {
            std::function<void()> operation = std::move(waiting.front());
            waiting.pop_front();
            ++ran;
            operation();
        }
    }
};

struct Event {
    Stream* stream = nullptr;
    unsigned long long until = 0;
};

static std::recursive_mutex LOCK;
static std::map<Pointer, std::size_t> MEMORY;
static std::size_t USED = 0;
static const std::size_t TOTAL = std::size_t(1) << 28;
static int DEVICES = 1;
static thread_local void* CURRENT = nullptr;
static int CONTEXT;

#define LOCKED std::lock_guard<std::recursive_mutex> locked(LOCK)

// Tells how many devices there are. Tests call it.
DRIVER void fake_devices(int count) { DEVICES = count; }

DRIVER Result cuInit(unsigned) { return DEVICES > 0 ? SUCCESS : NO_DEVICE; }

DRIVER Result cuDriverGetVersion(int* version) {
    *version = 13000;
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

DRIVER Result cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 75:  // The major number of the compute capability.
            *value = 8;
            return SUCCESS;
        case 76:  // The minor number.
            *value = 0;
            return SUCCESS;
        case 115:  // Memory that is allocated in the order of a stream.
            *value = 1;
            return SUCCESS;
        default:
            return INVALID_VALUE;
    }
}

DRIVER Result cuDevicePrimaryCtxRetain(void** context, int) {
    *context = &CONTEXT;
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
DRIVER Result cuCtxSynchronize() { return SUCCESS; }

DRIVER Result cuStreamCreate(void** stream, unsigned) {
    *stream = new Stream;
    return SUCCESS;
}

DRIVER Result cuStreamSynchronize(Stream* stream) {
    LOCKED;
    stream->run(stream->queued);
    return SUCCESS;
}

DRIVER Result cuStreamDestroy_v2(Stream* stream) {
    cuStreamSynchronize(stream);
    // An event may still name it.
    return SUCCESS;
}

DRIVER Result cuEventCreate(void** event, unsigned) {
    *event = new Event;
    return SUCCESS;
}

DRIVER Result cuEventDestroy_v2(Event* event) {
    delete event;
    return SUCCESS;
}

DRIVER Result cuEventRecord(Event* event, Stream* stream) {
    LOCKED;
    *event = Event{stream, stream->queued};
    return SUCCESS;
}

DRIVER Result cuEventSynchronize(Event* event) {
    LOCKED;
    event->stream->run(event->until);
    return SUCCESS;
}

DRIVER Result cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    LOCKED;
    const Event recorded = *event;
    stream->queue([recorded] { recorded.stream->run(recorded.until); });
    return SUCCESS;
}

// The memory is there at once. What it holds is written in the order of the stream.
DRIVER Result cuMemAllocAsync(Pointer* pointer, std::size_t bytes, Stream* stream) {
    LOCKED;
    if (bytes == 0) {
        return INVALID_VALUE;
    }
    if (USED + bytes > TOTAL) {
        return OUT_OF_MEMORY;
    }
    char* memory = new char[bytes];
    *pointer = reinterpret_cast<Pointer>(memory);
    MEMORY[*pointer] = bytes;
    USED += bytes;
    stream->queue([=] { std::memset(memory, 0xCD, bytes); });
    return SUCCESS;
}

// Freed memory is never used again, so that a late reader finds the pattern.
DRIVER Result cuMemFreeAsync(Pointer pointer, Stream* stream) {
    LOCKED;
    const auto found = MEMORY.find(pointer);
    if (found == MEMORY.end()) {
        return INVALID_VALUE;
    }
    const std::size_t bytes = found->second;
    MEMORY.erase(found);
    stream->queue([=] {
        std::memset(reinterpret_cast<void*>(pointer), 0xDD, bytes);
        USED -= bytes;
    });
    return SUCCESS;
}

DRIVER Result cuMemsetD8Async(Pointer to, unsigned char value, std::size_t bytes, Stream* stream) {
    LOCKED;
    stream->queue([=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
    return SUCCESS;
}

DRIVER Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, std::size_t bytes, Stream* stream) {
    LOCKED;
    stream->queue([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
    return SUCCESS;
}

// The copy may read the host's memory as late as the stream is waited for, as from pinned memory.
DRIVER Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, std::size_t bytes, Stream* stream) {
    LOCKED;
    stream->queue([=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
    return SUCCESS;
}

DRIVER Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, std::size_t bytes, Stream* stream) {
    LOCKED;
    stream->queue([=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
    return SUCCESS;
}

// A module is the PTX: the names of its kernels are compared with those of the host.
DRIVER Result cuModuleLoadData(void** module, const void* image) {
    *module = new std::string(static_cast<const char*>(image));
    return SUCCESS;
}

DRIVER Result cuModuleUnload(std::string* module) {
    delete module;
    return SUCCESS;
}

DRIVER Result cuModuleGetFunction(const Kernel** function, const std::string* module, const char* name) {
    if (module->find(std::string(".entry ") + name + "(") == std::string::npos) {
        return NOT_FOUND;
    }
    *function = find(name);
    return *function == nullptr ? NOT_FOUND : SUCCESS;
}

DRIVER Result cuLaunchKernel(const Kernel* kernel, unsigned blocks, unsigned, unsigned, unsigned threads,
                             unsigned, unsigned, unsigned, Stream* stream, void** arguments, void**) {
    LOCKED;
    if (CURRENT != &CONTEXT || blocks == 0 || threads == 0) {
        return INVALID_VALUE;
    }
    stream->queue(kernel->launch(blocks, threads, arguments));
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
