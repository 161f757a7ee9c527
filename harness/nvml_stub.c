/* NVIDIA's management library, as far as everstep asks it, for machines without a GPU: two GPUs, whose values are in the file that
 * $NVML_STUB names, a line each: "1.ecc 3". What is not there is 0; "1.error 15" makes every call about GPU 1 fail with that code. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, TIMEOUT = 10 };

typedef struct { unsigned index; } *device_t;
static struct { unsigned index; } gpus[2] = {{0}, {1}};
static unsigned long long told[2];

static unsigned long long value(device_t gpu, const char *what, unsigned long long otherwise) {
    char wanted[64], name[64];
    unsigned long long found = otherwise, v;
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    if (!file) return otherwise;
    snprintf(wanted, sizeof wanted, "%u.%s", gpu->index, what);
    while (fscanf(file, "%63s %llu", name, &v) == 2)
        if (!strcmp(name, wanted)) found = v;
    fclose(file);
    return found;
}

static int failure(device_t gpu) { return (int)value(gpu, "error", SUCCESS); }

#define READ(name, type, what, otherwise)                  \
    int name(device_t gpu, type *out) {                    \
        *out = (type)value(gpu, what, otherwise);          \
        return failure(gpu);                               \
    }

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *gpu) {
    if (index > 1) return INVALID;
    *gpu = (device_t)&gpus[index];
    return SUCCESS;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci_t;
int nvmlDeviceGetPciInfo_v3(device_t gpu, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", 0x3b + gpu->index);
    return SUCCESS;
}

READ(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "lanes", 16)
READ(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "slowed", 0)

int nvmlDeviceGetTotalEccErrors(device_t gpu, int kind, int since, unsigned long long *out) {
    (void)kind, (void)since;
    *out = value(gpu, "ecc", 0);
    return failure(gpu);
}

int nvmlDeviceGetTemperature(device_t gpu, int sensor, unsigned *out) {
    (void)sensor;
    *out = (unsigned)value(gpu, "temperature", 41);
    return failure(gpu);
}

int nvmlDeviceGetNvLinkState(device_t gpu, unsigned link, int *up) {
    if (link >= 18) return INVALID;
    *up = link < value(gpu, "links", 18);
    return failure(gpu);
}

typedef struct { unsigned id, scope; long long at, took; int type, result; union { double d; unsigned u; unsigned long long l; } value; } field_t;
int nvmlDeviceGetFieldValues(device_t gpu, int count, field_t *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].type = 1;
        fields[i].result = SUCCESS;
        fields[i].value.u = fields[i].id == 145 ? (unsigned)value(gpu, "remap-failed", 0) : 0;
    }
    return failure(gpu);
}

int nvmlEventSetCreate(void **set) { *set = gpus; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(device_t gpu, unsigned long long kinds, void *set) {
    (void)gpu, (void)kinds, (void)set;
    return SUCCESS;
}

typedef struct { device_t gpu; unsigned long long kind, data; unsigned gi, ci; } event_t;
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned millis) {
    (void)set;
    for (unsigned waited = 0; waited < millis; waited += 50) {
        for (int i = 0; i < 2; i++) {
            unsigned long long xid = value((device_t)&gpus[i], "xid", 0);
            if (xid != told[i]) {
                told[i] = xid;
                *event = (event_t){.gpu = (device_t)&gpus[i], .kind = 8, .data = xid};
                return SUCCESS;
            }
        }
        usleep(50000);
    }
    return TIMEOUT;
}
