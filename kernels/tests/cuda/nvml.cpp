// A management library (NVML) without a device, for tests: it says what a test tells it to say.
//
// The values are lines `NAME VALUE`, as a test gives them to `fake_nvml`, or as they are at each
// call in the file that EBB_TEST_NVML names. `1.NAME VALUE` is of device 1 alone. A value that is
// missing is not supported by the device. Devices have the UUIDs of `driver.cpp`.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>

#define LIBRARY extern "C" __attribute__((visibility("default")))

typedef unsigned long long Number;
enum Result {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    GPU_IS_LOST = 15,
};

struct Device {
    unsigned index;
};

// `nvmlMemory_v2_t`.
struct Memory {
    unsigned version;
    Number total, reserved, free, used;
};

// `nvmlUtilization_t`, in percent.
struct Utilization {
    unsigned gpu, memory;
};

static const unsigned DEVICES_MAX = 8;
static Device DEVICES[DEVICES_MAX] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static std::mutex LOCK;
static std::string TEXT;

static unsigned devices() {
    const char* text = std::getenv("EBB_TEST_DEVICES");
    const long count = text == nullptr ? 1 : std::atol(text);
    return count < 0 ? 0 : count > long(DEVICES_MAX) ? DEVICES_MAX : unsigned(count);
}

static std::string text() {
    if (const char* name = std::getenv("EBB_TEST_NVML")) {
        std::ifstream file(name);
        std::ostringstream all;
        all << file.rdbuf();
        return all.str();
    }
    std::lock_guard<std::mutex> locked(LOCK);
    return TEXT;
}

// Finds a value of a device.
static Result find(const Device* device, const std::string& name, Number* value) {
    std::istringstream lines(text());
    const std::string own = std::to_string(device->index) + "." + name;
    std::string key;
    Number found, shared = 0;
    bool is_shared = false;
    while (lines >> key >> found) {
        if (key == "lost" || key == std::to_string(device->index) + ".lost") {
            return GPU_IS_LOST;
        }
        if (key == own) {
            *value = found;
            return SUCCESS;
        }
        if (key == name) {
            shared = found;
            is_shared = true;
        }
    }
    *value = shared;
    return is_shared ? SUCCESS : NOT_SUPPORTED;
}

static Result find(const Device* device, const std::string& name, unsigned* value) {
    Number number = 0;
    const Result result = find(device, name, &number);
    *value = unsigned(number);
    return result;
}

static Result handle(unsigned index, Device** device) {
    if (index >= devices()) {
        return INVALID_ARGUMENT;
    }
    *device = &DEVICES[index];
    return SUCCESS;
}

// Sets the values of a process that has no EBB_TEST_NVML.
LIBRARY void fake_nvml(const char* values) {
    std::lock_guard<std::mutex> locked(LOCK);
    TEXT = values;
}

LIBRARY Result nvmlInit_v2() { return SUCCESS; }

LIBRARY Result nvmlInitWithFlags(unsigned) { return SUCCESS; }

LIBRARY Result nvmlShutdown() { return SUCCESS; }

LIBRARY const char* nvmlErrorString(Result) { return "an error of the test's NVML"; }

LIBRARY Result nvmlSystemGetDriverVersion(char* version, unsigned length) {
    std::snprintf(version, length, "580.65");
    return SUCCESS;
}

LIBRARY Result nvmlDeviceGetCount_v2(unsigned* count) {
    *count = devices();
    return SUCCESS;
}

LIBRARY Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** device) {
    return handle(index, device);
}

LIBRARY Result nvmlDeviceGetHandleByUUID(const char* uuid, Device** device) {
    for (unsigned index = 0; index < devices(); ++index) {
        char own[64];
        std::snprintf(own, sizeof own, "GPU-00000000-0000-0000-0000-%012u", index);
        if (std::strcmp(own, uuid) == 0) {
            return handle(index, device);
        }
    }
    return NOT_FOUND;
}

// The bus has the number of the device.
LIBRARY Result nvmlDeviceGetHandleByPciBusId_v2(const char* id, Device** device) {
    unsigned domain = 0, bus = 0;
    if (std::sscanf(id, "%x:%x:", &domain, &bus) != 2) {
        return INVALID_ARGUMENT;
    }
    return handle(bus, device);
}

LIBRARY Result nvmlDeviceGetUtilizationRates(const Device* device, Utilization* found) {
    found->memory = 0;
    return find(device, "busy", &found->gpu);
}

LIBRARY Result nvmlDeviceGetMemoryInfo_v2(const Device* device, Memory* found) {
    const Result result = find(device, "memory_total", &found->total);
    if (result != SUCCESS) {
        return result;
    }
    find(device, "memory_used", &found->used);
    found->reserved = 0;
    found->free = found->total - found->used;
    return SUCCESS;
}

// In milliwatts.
LIBRARY Result nvmlDeviceGetPowerUsage(const Device* device, unsigned* found) {
    return find(device, "power", found);
}

LIBRARY Result nvmlDeviceGetTemperature(const Device* device, unsigned, unsigned* found) {
    return find(device, "temperature", found);
}

// The bits of `nvmlClocksEventReasons`. The second function has the name of newer drivers.
LIBRARY Result nvmlDeviceGetCurrentClocksThrottleReasons(const Device* device, Number* found) {
    return find(device, "throttle", found);
}

LIBRARY Result nvmlDeviceGetCurrentClocksEventReasons(const Device* device, Number* found) {
    return find(device, "throttle", found);
}

// Type 0: corrected, 1: uncorrected. Counter 0: since the driver was loaded.
LIBRARY Result nvmlDeviceGetTotalEccErrors(const Device* device, unsigned type, unsigned counter,
                                           Number* found) {
    if (counter != 0) {
        return NOT_SUPPORTED;
    }
    return find(device, type == 0 ? "ecc_corrected" : "ecc_uncorrected", found);
}
