/* Kernels as the host sees them: attributes, launch limits, occupancy, and the table of
 * kernels that compiled-in code registers with the runtime. */
#define _GNU_SOURCE
#include "standin.h"

#include <pthread.h>
#include <stdlib.h>

#define KERNEL_MAGIC 0x4b495453u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct si_kernel **table;
static size_t room, taken;

static size_t slot_of(struct si_kernel **slots, size_t count, const void *stub)
{
    size_t at = ((uintptr_t)stub >> 4) * 0x9e3779b97f4a7c15ull % count;
    while (slots[at] != NULL && slots[at]->host_stub != stub)
        at = (at + 1) % count;
    return at;
}

static bool grow(void)
{
    size_t wider = room ? room * 2 : 16384;
    struct si_kernel **slots = calloc(wider, sizeof *slots);
    if (slots == NULL)
        return false;
    for (size_t i = 0; i < room; i++)
        if (table[i])
            slots[slot_of(slots, wider, table[i]->host_stub)] = table[i];
    free(table);
    table = slots;
    room = wider;
    return true;
}

void __cudaRegisterFunction(void **handle, const char *stub, char *device_function,
                            const char *name, int thread_limit, void *tid, void *bid,
                            void *block, void *grid, int *warp)
{
    (void)device_function, (void)thread_limit, (void)tid, (void)bid;
    (void)block, (void)grid, (void)warp;
    struct si_kernel *kernel = calloc(1, sizeof *kernel);
    pthread_mutex_lock(&lock);
    if (kernel && (taken * 2 < room || grow())) {
        size_t at = slot_of(table, room, stub);
        taken += table[at] == NULL;
        kernel->magic = KERNEL_MAGIC;
        kernel->name = name;
        kernel->library = handle;
        kernel->host_stub = stub;
        kernel->max_threads = 1024;
        kernel->max_dynamic_shared = 49152;
        table[at] = kernel;
    }
    pthread_mutex_unlock(&lock);
}

struct si_kernel *si_kernel_of(const void *function)
{
    if (function == NULL)
        return NULL;
    pthread_mutex_lock(&lock);
    struct si_kernel *kernel = room ? table[slot_of(table, room, function)] : NULL;
    pthread_mutex_unlock(&lock);
    if (kernel)
        return kernel;
    /* Not a stub: then a handle that came from here, which starts with its mark. */
    kernel = (struct si_kernel *)function;
    return kernel->magic == KERNEL_MAGIC ? kernel : NULL;
}

static int shared_limit(void)
{
    int limit = 0;
    si_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0, &limit);
    return limit;
}

CUresult si_kernel_get(const struct si_kernel *kernel, int attribute, int *value)
{
    if (kernel == NULL || value == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const struct si_pose *pose = si_pose();
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = kernel->max_threads;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = kernel->static_shared;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = kernel->local_bytes;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = kernel->registers;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = pose ? pose->major * 10 + pose->minor : 0;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = kernel->max_dynamic_shared;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        *value = 0;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        *value = -1;
        return CUDA_SUCCESS;
    default:
        si_trace("no value for function attribute %d", attribute);
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult si_kernel_set(struct si_kernel *kernel, int attribute, int value)
{
    if (kernel == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        break;
    default:
        /* Triton tries newer attributes and takes its older way when they are unknown. */
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (value < 0 || value + kernel->static_shared > shared_limit())
        return CUDA_ERROR_INVALID_VALUE;
    kernel->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult si_check_launch(const struct si_kernel *kernel, unsigned blocks_x, unsigned blocks_y,
                         unsigned blocks_z, unsigned threads_x, unsigned threads_y,
                         unsigned threads_z, unsigned dynamic_shared)
{
    if (kernel == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    unsigned long long threads = (unsigned long long)threads_x * threads_y * threads_z;
    bool fits = blocks_x && blocks_y && blocks_z && blocks_x <= 2147483647u && blocks_y <= 65535 &&
                blocks_z <= 65535 && threads >= 1 && threads <= 1024 && threads_z <= 64;
    if (!fits) {
        si_trace("launch of %s refused: grid %u %u %u, block %u %u %u", kernel->name, blocks_x,
                 blocks_y, blocks_z, threads_x, threads_y, threads_z);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if ((int)threads > kernel->max_threads)
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    int allowed = kernel->max_dynamic_shared;
    if ((long long)dynamic_shared > allowed) {
        si_trace("launch of %s refused: %u bytes of shared memory, %d allowed", kernel->name,
                 dynamic_shared, allowed);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

int si_occupancy(const struct si_kernel *kernel, int threads, size_t dynamic_shared)
{
    if (threads <= 0 || threads > 1024)
        return 0;
    int warps = (threads + 31) / 32;
    int blocks = 64 / warps < 32 ? 64 / warps : 32;
    size_t shared = dynamic_shared + (kernel ? (size_t)kernel->static_shared : 0) + 1024;
    int by_shared = (int)(233472 / shared);
    if (by_shared < blocks)
        blocks = by_shared;
    if (kernel && kernel->registers > 0) {
        int by_registers = 65536 / ((kernel->registers + 7) / 8 * 8 * 32) / 4 * 4 / warps;
        if (by_registers < blocks)
            blocks = by_registers;
    }
    return blocks;
}
