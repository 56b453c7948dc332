/* Device memory is host memory that is never paged in until somebody touches it, so a
 * model larger than the machine "loads".  What is recorded here is what the host decides
 * on: addresses, sizes, kinds, and how much of the posed device this process has taken;
 * what other processes hold on the same device is not counted. */
#define _GNU_SOURCE
#include "standin.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULE ((size_t)2 << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct si_block *blocks;
static size_t block_count, block_room;
static size_t used_bytes[SI_MAX_DEVICES];
static unsigned long long next_id = 1;

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork, after_fork);
}

/* First block whose base is above the address. */
static size_t upper_bound(uintptr_t address)
{
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool insert(struct si_block block)
{
    if (block_count == block_room) {
        size_t room = block_room ? block_room * 2 : 256;
        struct si_block *grown = realloc(blocks, room * sizeof *blocks);
        if (grown == NULL)
            return false;
        blocks = grown;
        block_room = room;
    }
    size_t at = upper_bound(block.base);
    memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof *blocks);
    blocks[at] = block;
    block_count++;
    return true;
}

/* A driver hands out memory in 2 MiB pages and packs small allocations into them. */
static size_t charge(size_t size)
{
    return size >= GRANULE ? (size + GRANULE - 1) / GRANULE * GRANULE : size;
}

static bool counts(enum si_kind kind) { return kind == SI_DEVICE || kind == SI_MANAGED; }

CUresult si_alloc(enum si_kind kind, int device, size_t size, unsigned flags, void **out)
{
    const struct si_pose *pose = si_pose();
    if (pose == NULL)
        return CUDA_ERROR_NO_DEVICE;
    if (out == NULL || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!counts(kind) || used_bytes[device] + charge(size) <= pose->total_bytes) {
        int protection = kind == SI_RESERVED ? PROT_NONE : PROT_READ | PROT_WRITE;
        void *base = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base != MAP_FAILED) {
            struct si_block block = {(uintptr_t)base, size, kind, device, flags, next_id++};
            if (insert(block)) {
                if (counts(kind))
                    used_bytes[device] += charge(size);
                *out = base;
                result = CUDA_SUCCESS;
            } else {
                munmap(base, size);
            }
        }
    }
    pthread_mutex_unlock(&lock);
    if (result != CUDA_SUCCESS)
        si_trace("allocation of %zu bytes on device %d refused", size, device);
    return result;
}

CUresult si_take(int device, size_t size)
{
    pthread_mutex_lock(&lock);
    bool fits = used_bytes[device] + size <= si_pose()->total_bytes;
    if (fits)
        used_bytes[device] += size;
    pthread_mutex_unlock(&lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void si_give_back(int device, size_t size)
{
    pthread_mutex_lock(&lock);
    used_bytes[device] -= size;
    pthread_mutex_unlock(&lock);
}

bool si_on_device(enum si_kind kind)
{
    return kind == SI_DEVICE || kind == SI_RESERVED || kind == SI_PEER;
}

CUresult si_register(void *base, size_t size, unsigned flags)
{
    if (base == NULL || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    size_t at = upper_bound((uintptr_t)base);
    bool taken = at > 0 && (uintptr_t)base < blocks[at - 1].base + blocks[at - 1].size;
    CUresult result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!taken) {
        struct si_block block = {(uintptr_t)base, size, SI_REGISTERED, si_current_device(), flags,
                                 next_id++};
        result = insert(block) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult si_free(void *base, enum si_kind kind)
{
    pthread_mutex_lock(&lock);
    size_t at = upper_bound((uintptr_t)base);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (at > 0 && blocks[at - 1].base == (uintptr_t)base) {
        struct si_block block = blocks[at - 1];
        bool fits = block.kind == kind || (kind == SI_DEVICE && block.kind == SI_MANAGED);
        if (fits) {
            if (counts(block.kind))
                used_bytes[block.device] -= charge(block.size);
            if (block.kind != SI_REGISTERED)
                munmap(base, block.size);
            memmove(blocks + at - 1, blocks + at, (block_count - at) * sizeof *blocks);
            block_count--;
            result = CUDA_SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

bool si_find(const void *address, struct si_block *out)
{
    pthread_mutex_lock(&lock);
    size_t at = upper_bound((uintptr_t)address);
    bool found = at > 0 && (uintptr_t)address < blocks[at - 1].base + blocks[at - 1].size;
    if (found)
        *out = blocks[at - 1];
    pthread_mutex_unlock(&lock);
    return found;
}

void si_memory_info(int device, size_t *free_bytes, size_t *total_bytes)
{
    const struct si_pose *pose = si_pose();
    /* A context and the loaded kernels take some memory before the first allocation. */
    size_t context = (size_t)500 << 20;
    pthread_mutex_lock(&lock);
    size_t used = used_bytes[device] + context;
    pthread_mutex_unlock(&lock);
    if (total_bytes)
        *total_bytes = pose->total_bytes;
    if (free_bytes)
        *free_bytes = used < pose->total_bytes ? pose->total_bytes - used : 0;
}

void si_copy(void *to, const void *from, size_t bytes)
{
    if (bytes)
        memmove(to, from, bytes);
}

void si_fill(void *to, unsigned value, int width, size_t count)
{
    struct si_block block;
    size_t bytes = count * (size_t)width;
    uintptr_t start = (uintptr_t)to, end = start + bytes;
    /* Zero whole pages by giving them back: a KV cache larger than the machine is zeroed. */
    if (value == 0 && bytes >= 65536 && si_find(to, &block) && block.kind != SI_REGISTERED &&
        end <= block.base + block.size) {
        uintptr_t first = (start + 4095) & ~(uintptr_t)4095, last = end & ~(uintptr_t)4095;
        if (madvise((void *)first, last - first, MADV_DONTNEED) == 0) {
            memset(to, 0, first - start);
            memset((void *)last, 0, end - last);
            return;
        }
    }
    if (width == 1 || value == 0) {
        memset(to, (int)value, bytes);
    } else if (width == 2) {
        for (size_t i = 0; i < count; i++)
            ((uint16_t *)to)[i] = (uint16_t)value;
    } else {
        for (size_t i = 0; i < count; i++)
            ((uint32_t *)to)[i] = value;
    }
}
