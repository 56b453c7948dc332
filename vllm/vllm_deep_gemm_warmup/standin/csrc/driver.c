/* The CUDA driver: devices, memory, streams, launches, tensor maps. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

CUresult cuInit(unsigned int flags)
{
    (void)flags;
    return si_device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = si_pose() ? si_pose()->driver_version : 0;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = si_error_name((int)error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_SUCCESS ? "no error" : si_error_name((int)error);
    return CUDA_SUCCESS;
}

/* ---- devices ---- */

static CUresult known(CUdevice device)
{
    return device >= 0 && device < si_device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int *count)
{
    *count = si_device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return known(ordinal);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    if (known(device) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", si_pose()->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    if (known(device) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_DEVICE;
    si_uuid(si_board_index(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    if (known(device) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = si_pose()->total_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    return si_attribute((int)attribute, device, value);
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    if (known(device) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)length, "0000:%02x:00.0", si_board_index(device) + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    if (known(device) != CUDA_SUCCESS || known(peer) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    if (si_device_count() == 0)
        return CUDA_ERROR_NO_DEVICE;
    si_memory_info(si_current_device(), free_bytes, total_bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    return si_alloc(SI_DEVICE, si_current_device(), size, 0, (void **)address);
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream)
{
    (void)stream;
    return si_alloc(SI_DEVICE, si_current_device(), size, 0, (void **)address);
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags)
{
    return si_alloc(SI_MANAGED, si_current_device(), size, flags, (void **)address);
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    return address ? si_free((void *)address, SI_DEVICE) : CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    (void)stream;
    return cuMemFree_v2(address);
}

CUresult cuMemAllocHost_v2(void **address, size_t size)
{
    return si_alloc(SI_HOST, si_current_device(), size, 0, address);
}

CUresult cuMemHostAlloc(void **address, size_t size, unsigned int flags)
{
    return si_alloc(SI_HOST, si_current_device(), size, flags, address);
}

CUresult cuMemFreeHost(void *address) { return si_free(address, SI_HOST); }

CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned int flags)
{
    return si_register(address, size, flags);
}

CUresult cuMemHostUnregister(void *address)
{
    CUresult result = si_free(address, SI_REGISTERED);
    return result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned int flags)
{
    struct si_block block;
    (void)flags;
    if (!si_find(host, &block) || si_on_device(block.kind))
        return CUDA_ERROR_INVALID_VALUE;
    *device = (CUdeviceptr)host;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    struct si_block block;
    if (!si_find((void *)address, &block))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = block.base;
    if (size)
        *size = block.size;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address)
{
    struct si_block block;
    if (!si_find((void *)address, &block))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return cuDevicePrimaryCtxRetain(out, block.device);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = si_on_device(block.kind) || block.kind == SI_MANAGED
                               ? CU_MEMORYTYPE_DEVICE
                               : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER && si_on_device(block.kind))
            return CUDA_ERROR_INVALID_VALUE;
        *(CUdeviceptr *)out = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)out = block.id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)out = block.kind == SI_MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = block.device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)out = block.base;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)out = block.size;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned char *)out = 1;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)out = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned char *)out = 0;
        return CUDA_SUCCESS;
    default:
        return si_unsupported("cuPointerGetAttribute");
    }
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **out,
                                CUdeviceptr address)
{
    for (unsigned i = 0; i < count; i++)
        if (cuPointerGetAttribute(out[i], attributes[i], address) != CUDA_SUCCESS)
            memset(out[i], 0, sizeof(unsigned));
    return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                               CUdeviceptr address)
{
    struct si_block block;
    (void)value;
    if (!si_find((void *)address, &block))
        return CUDA_ERROR_INVALID_VALUE;
    return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS
                                                         : si_unsupported("cuPointerSetAttribute");
}

static CUresult copy(const void *to, const void *from, size_t bytes, CUstream stream)
{
    if (!si_recorded(stream))
        si_copy((void *)to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy((void *)to, (void *)from, bytes, NULL);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy((void *)to, (void *)from, bytes, stream);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    return copy((void *)to, from, bytes, NULL);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    return copy((void *)to, from, bytes, stream);
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    return copy(to, (void *)from, bytes, NULL);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy(to, (void *)from, bytes, stream);
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy((void *)to, (void *)from, bytes, NULL);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy((void *)to, (void *)from, bytes, stream);
}

static CUresult fill(CUdeviceptr to, unsigned value, int width, size_t count, CUstream stream)
{
    if (!si_recorded(stream))
        si_fill((void *)to, value, width, count);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    return fill(to, value, 1, count, NULL);
}
CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count)
{
    return fill(to, value, 2, count, NULL);
}
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count)
{
    return fill(to, value, 4, count, NULL);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    return fill(to, value, 1, count, stream);
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream)
{
    return fill(to, value, 2, count, stream);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream)
{
    return fill(to, value, 4, count, stream);
}

/* ---- streams and events ---- */

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    return si_stream_create(stream, flags, 0);
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    return si_stream_create(stream, flags, priority);
}
CUresult cuStreamDestroy_v2(CUstream stream) { return si_stream_destroy(stream); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    return (void)flags, si_stream_wait(stream, event);
}
CUresult cuStreamSynchronize(CUstream stream)
{
    return si_capturing(stream) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream stream) { return cuStreamSynchronize(stream); }
CUresult cuStreamGetPriority(CUstream stream, int *priority)
{
    *priority = si_stream(stream)->priority;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetFlags(CUstream stream, unsigned int *flags)
{
    *flags = si_stream(stream)->flags;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetId(CUstream stream, unsigned long long *id)
{
    *id = si_stream(stream)->id;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetDevice(CUstream stream, CUdevice *device)
{
    *device = si_stream(stream)->device;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    return cuDevicePrimaryCtxRetain(context, si_stream(stream)->device);
}
CUresult cuEventCreate(CUevent *event, unsigned int flags) { return si_event_create(event, flags); }
CUresult cuEventDestroy_v2(CUevent event) { return si_event_destroy(event); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return si_event_record(event, stream); }
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags)
{
    return (void)flags, si_event_record(event, stream);
}
CUresult cuEventQuery(CUevent event) { return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
CUresult cuEventSynchronize(CUevent event) { return cuEventQuery(event); }
CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    return si_event_elapsed(milliseconds, start, end);
}

/* ---- kernels ---- */

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    return si_kernel_get((struct si_kernel *)function, (int)attribute, value);
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    return si_kernel_set((struct si_kernel *)function, (int)attribute, value);
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    return (void)function, (void)config, CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction function)
{
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel,
                              CUdevice device)
{
    return (void)device, si_kernel_get((struct si_kernel *)kernel, (int)attribute, value);
}
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                              CUdevice device)
{
    return (void)device, si_kernel_set((struct si_kernel *)kernel, (int)attribute, value);
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared, CUstream stream,
                        void **arguments, void **extra)
{
    (void)arguments, (void)extra;
    CUresult result = si_check_launch((struct si_kernel *)function, grid_x, grid_y, grid_z, block_x,
                                      block_y, block_z, shared);
    if (result == CUDA_SUCCESS)
        si_recorded(stream);
    return result;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments,
                          void **extra)
{
    return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
                          c->blockDimY, c->blockDimZ, c->sharedMemBytes, c->hStream, arguments,
                          extra);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int shared, CUstream stream,
                                   void **arguments)
{
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared,
                          stream, arguments, NULL);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                     size_t shared)
{
    *blocks = si_occupancy((struct si_kernel *)function, threads, shared);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function,
                                                              int threads, size_t shared,
                                                              unsigned int flags)
{
    return (void)flags,
           cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

/* Portable clusters hold 8 blocks.  How many fit at once depends on the chip's layout, so the
 * answer assumes that each cluster finds its blocks anywhere on the device. */
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *c)
{
    int size = 1;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            size = (int)(c->attrs[i].value.clusterDim.x * c->attrs[i].value.clusterDim.y *
                         c->attrs[i].value.clusterDim.z);
    int per_sm = si_occupancy((struct si_kernel *)function,
                              (int)(c->blockDimX * c->blockDimY * c->blockDimZ), c->sharedMemBytes);
    *clusters = size > 0 ? si_pose()->sm_count * per_sm / size : 0;
    return CUDA_SUCCESS;
}

/* ---- tensor maps: the documented limits are checked, the content is for a device ---- */

/* No limit that the driver documents, so it takes an environment variable to have it. */
static bool overlap_refused(size_t reach, cuuint32_t rank, const cuuint64_t *size,
                            const cuuint64_t *strides)
{
    const char *text = getenv("STANDIN_GPU_REFUSE_OVERLAP");
    if (text == NULL || strcmp(text, "1"))
        return false;
    bool seen[4] = {false};
    for (cuuint32_t count = 0; count + 1 < rank; count++) {
        /* By stride: the rows of one matrix may lie between those of another. */
        cuuint32_t next = rank;
        for (cuuint32_t i = 0; i + 1 < rank; i++)
            if (!seen[i] && (next == rank || strides[i] < strides[next]))
                next = i;
        seen[next] = true;
        if (size[next + 1] == 1)
            continue;
        if (strides[next] < reach) {
            si_trace("tensor map refused: %llu bytes apart, %zu long",
                     (unsigned long long)strides[next], reach);
            return true;
        }
        reach += (size[next + 1] - 1) * strides[next];
    }
    return false;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *size, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    static const int widths[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    (void)promotion, (void)fill;
    if (map == NULL || rank < 1 || rank > 5 || (uintptr_t)address % 16)
        return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t i = 0; i < rank; i++) {
        bool fits = size[i] >= 1 && size[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 &&
                    steps[i] >= 1 && steps[i] <= 8;
        if (fits && i + 1 < rank)
            fits = strides[i] % 16 == 0 && strides[i] < 1ull << 40;
        if (!fits) {
            si_trace("tensor map refused: dimension %u, size %llu, box %u", i,
                     (unsigned long long)size[i], box[i]);
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if ((size_t)type < sizeof widths / sizeof *widths && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE) {
        size_t row = (size_t)box[0] * (size_t)widths[type];
        size_t limit = swizzle == CU_TENSOR_MAP_SWIZZLE_32B    ? 32
                       : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                       : swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? SIZE_MAX
                                                               : 128;
        if (row % 16 || row > limit) {
            si_trace("tensor map refused: a box row of %zu bytes, swizzle %d", row, (int)swizzle);
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (overlap_refused(size[0] * (size_t)widths[type], rank, size, strides))
            return CUDA_ERROR_INVALID_VALUE;
    }
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address)
{
    return map && (uintptr_t)address % 16 == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
