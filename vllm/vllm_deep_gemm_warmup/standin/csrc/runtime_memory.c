/* The CUDA runtime: memory. */
#define _GNU_SOURCE
#include "runtime.h"

#include <string.h>

cudaError_t cudaMalloc(void **out, size_t size)
{
    if (size == 0 && out) {
        *out = NULL;
        return cudaSuccess;
    }
    return DONE(si_alloc(SI_DEVICE, si_current_device(), size, 0, out));
}

cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream)
{
    (void)stream;
    return cudaMalloc(out, size);
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t pool, cudaStream_t stream)
{
    (void)pool, (void)stream;
    return cudaMalloc(out, size);
}

cudaError_t cudaMallocManaged(void **out, size_t size, unsigned int flags)
{
    return DONE(si_alloc(SI_MANAGED, si_current_device(), size, flags, out));
}

cudaError_t cudaMallocHost(void **out, size_t size)
{
    return DONE(si_alloc(SI_HOST, si_current_device(), size, 0, out));
}

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned int flags)
{
    return DONE(si_alloc(SI_HOST, si_current_device(), size, flags, out));
}

cudaError_t cudaFree(void *address)
{
    return address == NULL ? cudaSuccess : DONE(si_free(address, SI_DEVICE));
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream)
{
    (void)stream;
    return cudaFree(address);
}

cudaError_t cudaFreeHost(void *address)
{
    return address == NULL ? cudaSuccess : DONE(si_free(address, SI_HOST));
}

cudaError_t cudaHostRegister(void *address, size_t size, unsigned int flags)
{
    return DONE(si_register(address, size, flags));
}

cudaError_t cudaHostUnregister(void *address)
{
    CUresult result = si_free(address, SI_REGISTERED);
    return DONE(result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
    struct si_block block;
    (void)flags;
    if (!si_find(host, &block) || si_on_device(block.kind))
        return DONE(CUDA_ERROR_INVALID_VALUE);
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaHostGetFlags(unsigned int *flags, void *host)
{
    struct si_block block;
    if (!si_find(host, &block))
        return DONE(CUDA_ERROR_INVALID_VALUE);
    *flags = block.flags;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    if (si_device_count() == 0)
        return DONE(CUDA_ERROR_NO_DEVICE);
    si_memory_info(si_current_device(), free_bytes, total_bytes);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address)
{
    struct si_block block;
    memset(attributes, 0, sizeof *attributes);
    if (!si_find(address, &block)) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        attributes->hostPointer = (void *)address;
        return cudaSuccess;
    }
    bool device = si_on_device(block.kind);
    attributes->type = device                     ? cudaMemoryTypeDevice
                       : block.kind == SI_MANAGED ? cudaMemoryTypeManaged
                                                  : cudaMemoryTypeHost;
    attributes->device = block.device;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = device ? NULL : (void *)address;
    return cudaSuccess;
}

/* ---- copies and fills ---- */

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream)
{
    if (!si_recorded(stream))
        si_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    return (void)kind, copy(to, from, bytes, NULL);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return (void)kind, copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes)
{
    return (void)to_device, (void)from_device, copy(to, from, bytes, NULL);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t stream)
{
    return (void)to_device, (void)from_device, copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    (void)kind;
    if (si_recorded(stream))
        return cudaSuccess;
    for (size_t row = 0; row < height; row++)
        si_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, enum cudaMemcpyKind kind)
{
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}

cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes,
                                 size_t count, struct cudaMemcpyAttributes *attributes,
                                 size_t *indices, size_t attribute_count, cudaStream_t stream)
{
    (void)attributes, (void)indices, (void)attribute_count;
    for (size_t i = 0; i < count; i++)
        copy(to[i], from[i], sizes[i], stream);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    si_fill(to, (unsigned char)value, 1, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    if (!si_recorded(stream))
        si_fill(to, (unsigned char)value, 1, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream)
{
    if (si_recorded(stream))
        return cudaSuccess;
    for (size_t row = 0; row < height; row++)
        si_fill((char *)to + row * pitch, (unsigned char)value, 1, width);
    return cudaSuccess;
}

cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height)
{
    return cudaMemset2DAsync(to, pitch, value, width, height, NULL);
}

cudaError_t cudaMemPrefetchAsync(const void *address, size_t bytes, struct cudaMemLocation location,
                                 unsigned int flags, cudaStream_t stream)
{
    (void)address, (void)bytes, (void)location, (void)flags, (void)stream;
    return cudaSuccess;
}

cudaError_t cudaMemAdvise(const void *address, size_t bytes, enum cudaMemoryAdvise advice,
                          struct cudaMemLocation location)
{
    (void)address, (void)bytes, (void)advice, (void)location;
    return cudaSuccess;
}

/* ---- pools: one per device, a token; memory is taken and given back at once ---- */

static char pools[SI_MAX_DEVICES];

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    if (device < 0 || device >= si_device_count())
        return DONE(CUDA_ERROR_INVALID_DEVICE);
    *pool = (cudaMemPool_t)&pools[device];
    return cudaSuccess;
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device)
{
    return cudaDeviceGetDefaultMemPool(pool, device);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
    return (void)pool, (void)attribute, (void)value, cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
    (void)pool;
    if (attribute < cudaMemPoolAttrReservedMemCurrent)
        return DONE(si_unsupported("cudaMemPoolGetAttribute"));
    *(cuuint64_t *)value = 0;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access,
                                 size_t count)
{
    return (void)pool, (void)access, (void)count, cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes)
{
    return (void)pool, (void)bytes, cudaSuccess;
}

cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute,
                                           void *value)
{
    (void)device, (void)attribute;
    *(cuuint64_t *)value = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute,
                                           void *value)
{
    return (void)device, (void)attribute, (void)value, cudaSuccess;
}
