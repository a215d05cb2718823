/* fault.c - calls that fail on purpose: the n-th of a kind, registrations, sticky errors. */
#include "sim_internal.h"

#include <string.h>

struct fault {
    uint64_t left; /* calls until it strikes; 0: none set */
    OOCUresult result;
    int lasting;
};

static struct fault faults[SIM_CALL_COUNT], any_fault;
static uint64_t counts[SIM_CALL_COUNT], total;
static uint64_t refuse_in;               /* registrations until the first refused one; 0: none */
static uint64_t lock_quota = UINT64_MAX; /* most bytes that are page-locked at a time */
static SIM_THREAD_LOCAL int in_host_function;

static const char *const names[SIM_CALL_COUNT] = {
#define SIM_NAME(base, symbol, introduced, traits, parameters) #base,
    SIM_CALLS(SIM_NAME)
#undef SIM_NAME
        "simAdopt",
    "simDrop",
    "simLaunch",
    "simHostAccess",
    "async h2d",
    "async d2h",
    "async kernel"};

static const int traits[SIM_CALL_COUNT] = {
#define SIM_TRAITS(base, symbol, introduced, traits, parameters) traits,
    SIM_CALLS(SIM_TRAITS)
#undef SIM_TRAITS
};

const char *sim__call_name(enum sim_call call) { return names[call]; }
int sim__in_host_function(void) { return in_host_function; }
void sim__set_in_host_function(int on) { in_host_function = on; }

int sim__is_sticky(OOCUresult result) {
    switch (result) {
    case OOCU_ERROR_ECC_UNCORRECTABLE:
    case OOCU_ERROR_NVLINK_UNCORRECTABLE:
    case OOCU_ERROR_CONTAINED:
    case OOCU_ERROR_ILLEGAL_ADDRESS:
    case OOCU_ERROR_LAUNCH_TIMEOUT:
    case OOCU_ERROR_ASSERT:
    case OOCU_ERROR_HARDWARE_STACK_ERROR:
    case OOCU_ERROR_ILLEGAL_INSTRUCTION:
    case OOCU_ERROR_MISALIGNED_ADDRESS:
    case OOCU_ERROR_INVALID_ADDRESS_SPACE:
    case OOCU_ERROR_INVALID_PC:
    case OOCU_ERROR_LAUNCH_FAILED:
    case OOCU_ERROR_TENSOR_MEMORY_LEAK:
    case OOCU_ERROR_MPS_CLIENT_TERMINATED:
    case OOCU_ERROR_EXTERNAL_DEVICE:
    case OOCU_ERROR_CONTEXT_IS_DESTROYED:
    case OOCU_ERROR_DEINITIALIZED:
    case OOCU_ERROR_UNKNOWN:
        return 1;
    default:
        return 0;
    }
}

/* Whether this call is the one to fail. */
static OOCUresult strike(struct fault *fault) {
    if (!fault->left)
        return OOCU_SUCCESS;
    fault->left--;
    if (fault->left)
        return OOCU_SUCCESS;
    fault->left = (uint64_t)fault->lasting;
    return fault->result;
}

/* A launch through simLaunch is refused on a lost context as one through the driver is; adopted
 * memory is torch's even after the device is lost. */
static int needs_context(enum sim_call call) {
    return call < CALL_simAdopt ? !(traits[call] & (SIM_ANY_TIME | SIM_NO_CONTEXT))
                                : call == CALL_simLaunch;
}

OOCUresult sim__enter(enum sim_call call) {
    sim__boot();
    int call_traits = traits[call];
    sim.call++;
    sim.current = call;
    counts[call]++;
    if (in_host_function && call != CALL_simHostAccess && !(call_traits & SIM_ANY_TIME)) {
        sim__report((uint64_t)call + 7000,
                    "lint: %s (call #%llu) from a host function, which must not call CUDA",
                    names[call], (unsigned long long)sim.call);
        return OOCU_ERROR_NOT_PERMITTED;
    }
    OOCUresult result = OOCU_SUCCESS;
    if (call < CALL_simAdopt && !(call_traits & SIM_ANY_TIME)) {
        total++;
        if (call != CALL_cuInit && call != CALL_cuDriverGetVersion && !sim.initialised)
            return OOCU_ERROR_NOT_INITIALIZED;
        if (sim.sticky == OOCU_SUCCESS)
            result = strike(&any_fault);
    }
    if (sim.sticky == OOCU_SUCCESS) {
        OOCUresult own = strike(&faults[call]);
        if (result == OOCU_SUCCESS)
            result = own;
        if (sim__is_sticky(result))
            sim.sticky = result;
    }
    if (sim.sticky != OOCU_SUCCESS) {
        if (sim.n_queued)
            sim__discard_all();
        sim__host_knows_all();
        if (result == OOCU_SUCCESS && needs_context(call))
            result = sim.sticky;
    }
    if (result != OOCU_SUCCESS || call >= CALL_simAdopt ||
        call_traits & (SIM_ANY_TIME | SIM_NO_CONTEXT))
        return result;
    int device = 0;
    return sim__current_device(&device);
}

void sim__async(enum sim_op_kind kind, OOCUresult fails) {
    enum sim_call call = kind == OP_H2D   ? CALL_async_h2d
                         : kind == OP_D2H ? CALL_async_d2h
                                          : CALL_async_kernel;
    if (kind != OP_H2D && kind != OP_D2H && kind != OP_KERNEL)
        return;
    counts[call]++;
    OOCUresult result = strike(&faults[call]);
    if (sim.sticky == OOCU_SUCCESS)
        sim.sticky = fails != OOCU_SUCCESS ? fails : result;
}

static int find(const char *call) {
    for (int i = 0; i < SIM_CALL_COUNT; i++)
        if (!strcmp(call, names[i]))
            return i;
    return -1;
}

OOCUresult simFault(const char *call, uint64_t nth, OOCUresult result, int lasting) {
    int i = call ? find(call) : 0;
    if (i < 0 || (result != OOCU_SUCCESS && !nth) || (call && traits[i] & SIM_ANY_TIME))
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    struct fault *fault = call ? &faults[i] : &any_fault;
    fault->left = result == OOCU_SUCCESS ? 0 : nth;
    fault->result = result;
    fault->lasting = !!lasting;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simFaultClear(void) {
    sim_os_lock(&sim.lock);
    memset(faults, 0, sizeof faults);
    memset(&any_fault, 0, sizeof any_fault);
    refuse_in = 0;
    sim.sticky = OOCU_SUCCESS;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

uint64_t simCallCount(const char *call) {
    int i = call ? find(call) : 0;
    if (i < 0)
        return 0;
    sim_os_lock(&sim.lock);
    uint64_t count = call ? counts[i] : total;
    sim_os_unlock(&sim.lock);
    return count;
}

OOCUresult simRefuseRegistration(uint64_t from_nth) {
    sim_os_lock(&sim.lock);
    refuse_in = from_nth;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

int sim__refuse_registration(void) {
    if (!refuse_in)
        return 0;
    if (refuse_in > 1) {
        refuse_in--;
        return 0;
    }
    return 1;
}

OOCUresult simLockQuota(uint64_t bytes) {
    sim_os_lock(&sim.lock);
    lock_quota = bytes;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

int sim__may_lock(size_t bytes) {
    const uint64_t locked = sim.live.registered_bytes + sim.live.host_alloc_bytes;
    return locked <= lock_quota && bytes <= lock_quota - locked;
}

void sim__fault_reset(void) {
    memset(faults, 0, sizeof faults);
    memset(&any_fault, 0, sizeof any_fault);
    memset(counts, 0, sizeof counts);
    total = 0;
    refuse_in = 0;
    lock_quota = UINT64_MAX;
    sim.sticky = OOCU_SUCCESS;
}
