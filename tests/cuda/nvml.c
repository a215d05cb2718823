/* nvml.c - libnvidia-ml.so.1 without a GPU: what torch, pynvml and the doctor ask of it.
 *
 * What is simulated is answered: cards, names, memory, this process. What is a matter of hardware
 * (clocks, power, heat, links) is not supported, as on a virtual machine. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, CARDS = 8 };
enum { VERSION = 13000 };

extern int cuInit(unsigned int flags);
extern int cuDeviceGetCount(int *count);
extern int cuDeviceGetName(char *name, int bytes, int device);
extern int cuDeviceGetPCIBusId(char *id, int bytes, int device);
extern int cuda_sim_memory(int device, uint64_t *used, uint64_t *total);

typedef struct card {
    int device;
} *card_t;
static struct card cards[CARDS] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

static int count(void) {
    int found = 0;
    return cuInit(0) || cuDeviceGetCount(&found) ? 0 : found;
}

static void uuid_of(int device, char *text, unsigned int bytes) {
    /* As torch prints the 16 bytes that the runtime gives: "without a GPU 0". */
    unsigned char raw[17];
    memset(raw, 0, sizeof raw);
    snprintf((char *)raw, sizeof raw, "without a GPU %d", device);
    snprintf(text, bytes,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", raw[0],
             raw[1], raw[2], raw[3], raw[4], raw[5], raw[6], raw[7], raw[8], raw[9], raw[10],
             raw[11], raw[12], raw[13], raw[14], raw[15]);
}

API int nvmlInit_v2(void) { return SUCCESS; }
API int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return SUCCESS;
}
API int nvmlShutdown(void) { return SUCCESS; }
API const char *nvmlErrorString(int error) {
    return error == SUCCESS ? "Success" : error == NOT_SUPPORTED ? "Not Supported" : "Not Found";
}
API int nvmlSystemGetDriverVersion(char *text, unsigned int bytes) {
    snprintf(text, bytes, "580.00");
    return SUCCESS;
}
API int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}
API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = VERSION;
    return SUCCESS;
}
API int nvmlDeviceGetCount_v2(unsigned int *found) {
    *found = (unsigned int)count();
    return SUCCESS;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned int index, card_t *card) {
    if (index >= (unsigned int)count())
        return NOT_FOUND;
    *card = &cards[index];
    return SUCCESS;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, card_t *card) {
    for (int device = 0; device < count(); device++) {
        char own[32];
        /* NVML writes the domain with eight digits, the driver with four. */
        if (!cuDeviceGetPCIBusId(own, sizeof own, device) && strstr(id, own)) {
            *card = &cards[device];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, card_t *card) {
    for (int device = 0; device < count(); device++) {
        char own[64];
        uuid_of(device, own, sizeof own);
        if (!strcmp(own, uuid)) {
            *card = &cards[device];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
API int nvmlDeviceGetName(card_t card, char *name, unsigned int bytes) {
    return cuInit(0) || cuDeviceGetName(name, (int)bytes, card->device) ? NOT_FOUND : SUCCESS;
}
API int nvmlDeviceGetUUID(card_t card, char *text, unsigned int bytes) {
    uuid_of(card->device, text, bytes);
    return SUCCESS;
}
API int nvmlDeviceGetIndex(card_t card, unsigned int *index) {
    *index = (unsigned int)card->device;
    return SUCCESS;
}
struct memory {
    unsigned long long total, free, used;
};
API int nvmlDeviceGetMemoryInfo(card_t card, struct memory *memory) {
    uint64_t used, total;
    cuda_sim_memory(card->device, &used, &total);
    *memory = (struct memory){total, total - used, used};
    return SUCCESS;
}
struct process {
    unsigned int pid;
    unsigned long long bytes;
    unsigned int gpu_instance, compute_instance;
};
API int nvmlDeviceGetComputeRunningProcesses_v3(card_t card, unsigned int *found,
                                                struct process *processes) {
    uint64_t used, total;
    if (*found < 1) {
        *found = 1;
        return INSUFFICIENT_SIZE;
    }
    cuda_sim_memory(card->device, &used, &total);
    *found = 1;
    processes[0] = (struct process){(unsigned int)getpid(), used, UINT32_MAX, UINT32_MAX};
    return SUCCESS;
}
/* The first version of the same, which torch's report of running out of memory asks. */
struct process_v1 {
    unsigned int pid;
    unsigned long long bytes;
};
API int nvmlDeviceGetComputeRunningProcesses(card_t card, unsigned int *found,
                                             struct process_v1 *processes) {
    struct process now;
    const int result = nvmlDeviceGetComputeRunningProcesses_v3(card, found, &now);
    if (result == SUCCESS)
        processes[0] = (struct process_v1){now.pid, now.bytes};
    return result;
}

/* A card that is part of no fabric. */
struct fabric {
    unsigned int version;
    unsigned char cluster[16];
    int status;
    unsigned int clique;
    unsigned char state;
};
API int nvmlDeviceGetGpuFabricInfoV(card_t card, struct fabric *fabric) {
    (void)card;
    fabric->status = SUCCESS;
    fabric->state = 0; /* not supported */
    return SUCCESS;
}

/* torch looks these up when it starts. */
#define NOT(name)                                                                                  \
    API int name(void);                                                                            \
    int name(void) { return NOT_SUPPORTED; }
NOT(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT(nvmlDeviceGetMemoryInfo_v2)
