/* Virtual memory management: reserved ranges that memory is mapped into later (PyTorch's
 * expandable segments, vLLM's sleep mode).  A handle is an amount of the device's memory. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULE ((size_t)2 << 20)

struct handle {
    size_t size;
    int device;
    int references;
    CUmemAllocationProp properties;
};

static void drop(struct handle *handle)
{
    if (__atomic_sub_fetch(&handle->references, 1, __ATOMIC_ACQ_REL) == 0) {
        si_give_back(handle->device, handle->size);
        free(handle);
    }
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option)
{
    (void)properties, (void)option;
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment,
                             CUdeviceptr wished, unsigned long long flags)
{
    (void)wished, (void)flags;
    if (size == 0 || size % GRANULE || alignment > GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    return si_alloc(SI_RESERVED, si_current_device(), size, 0, (void **)address);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    (void)size;
    return si_free((void *)address, SI_RESERVED);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size,
                     const CUmemAllocationProp *properties, unsigned long long flags)
{
    (void)flags;
    if (size == 0 || size % GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    /* PyTorch asks for memory that could be exported as a file whether it will or not;
     * the export is what is not supported. */
    if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return si_unsupported("cuMemCreate with a handle of another kind than a file");
    int device = properties->location.id;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return si_unsupported("cuMemCreate outside the device");
    if (device < 0 || device >= si_device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = si_take(device, size);
    if (result != CUDA_SUCCESS)
        return result;
    struct handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (struct handle){size, device, 1, *properties};
    *out = (CUmemGenericAllocationHandle)handle;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    drop((struct handle *)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle)
{
    *properties = ((struct handle *)handle)->properties;
    return CUDA_SUCCESS;
}

struct mapping {
    CUdeviceptr address;
    struct handle *handle;
    struct mapping *next;
};

static struct mapping *mappings;
static int busy;

static void enter(void)
{
    while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE))
        ;
}

static void leave(void) { __atomic_store_n(&busy, 0, __ATOMIC_RELEASE); }

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)flags;
    struct si_block block;
    struct handle *memory = (struct handle *)handle;
    bool inside = si_find((void *)address, &block) && block.kind == SI_RESERVED &&
                  address + size <= block.base + block.size;
    if (!inside || offset != 0 || size > memory->size)
        return CUDA_ERROR_INVALID_VALUE;
    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (mapping == NULL || mprotect((void *)address, size, PROT_READ | PROT_WRITE) != 0) {
        free(mapping);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    __atomic_add_fetch(&memory->references, 1, __ATOMIC_ACQ_REL);
    *mapping = (struct mapping){address, memory, NULL};
    enter();
    mapping->next = mappings;
    mappings = mapping;
    leave();
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    enter();
    struct mapping **link = &mappings;
    while (*link) {
        struct mapping *mapping = *link;
        if (mapping->address < address || mapping->address >= address + size) {
            link = &mapping->next;
            continue;
        }
        *link = mapping->next;
        drop(mapping->handle);
        free(mapping);
    }
    leave();
    madvise((void *)address, size, MADV_DONTNEED);
    return mprotect((void *)address, size, PROT_NONE) == 0 ? CUDA_SUCCESS
                                                           : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access,
                        size_t count)
{
    struct si_block block;
    (void)size, (void)access, (void)count;
    return si_find((void *)address, &block) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
