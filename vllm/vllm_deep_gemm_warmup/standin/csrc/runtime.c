/* The CUDA runtime: device, error, stream, event, kernel and graph calls. */
#define _GNU_SOURCE
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread cudaError_t last_error;

cudaError_t si_done(CUresult result)
{
    if (result != CUDA_SUCCESS)
        last_error = (cudaError_t)result;
    return (cudaError_t)result;
}

/* ---- errors and versions ---- */

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t error) { return si_error_name((int)error); }

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : si_error_name((int)error);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = si_pose() ? si_pose()->driver_version : 0;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = si_device_count();
    return *count ? cudaSuccess : DONE(CUDA_ERROR_NO_DEVICE);
}

cudaError_t cudaGetDevice(int *device)
{
    if (si_device_count() == 0)
        return DONE(CUDA_ERROR_NO_DEVICE);
    *device = si_current_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return DONE(si_set_device(device)); }

cudaError_t cudaInitDevice(int device, unsigned int device_flags, unsigned int flags)
{
    (void)device_flags, (void)flags;
    return device >= 0 && device < si_device_count() ? cudaSuccess : DONE(CUDA_ERROR_INVALID_DEVICE);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    return DONE(si_attribute((int)attribute, device, value));
}

static int fact(CUdevice_attribute attribute, int device)
{
    int value = 0;
    si_attribute(attribute, device, &value);
    return value;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    const struct si_pose *pose = si_pose();
    if (p == NULL)
        return DONE(CUDA_ERROR_INVALID_VALUE);
    if (pose == NULL || device < 0 || device >= si_device_count())
        return DONE(CUDA_ERROR_INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", pose->name);
    si_uuid(si_board_index(device), (unsigned char *)p->uuid.bytes);
    p->totalGlobalMem = pose->total_bytes;
#define FACT(field, attribute) p->field = fact(CU_DEVICE_ATTRIBUTE_##attribute, device)
    FACT(sharedMemPerBlock, MAX_SHARED_MEMORY_PER_BLOCK);
    FACT(regsPerBlock, MAX_REGISTERS_PER_BLOCK);
    FACT(warpSize, WARP_SIZE);
    FACT(memPitch, MAX_PITCH);
    FACT(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK);
    FACT(maxThreadsDim[0], MAX_BLOCK_DIM_X);
    FACT(maxThreadsDim[1], MAX_BLOCK_DIM_Y);
    FACT(maxThreadsDim[2], MAX_BLOCK_DIM_Z);
    FACT(maxGridSize[0], MAX_GRID_DIM_X);
    FACT(maxGridSize[1], MAX_GRID_DIM_Y);
    FACT(maxGridSize[2], MAX_GRID_DIM_Z);
    FACT(totalConstMem, TOTAL_CONSTANT_MEMORY);
    FACT(major, COMPUTE_CAPABILITY_MAJOR);
    FACT(minor, COMPUTE_CAPABILITY_MINOR);
    FACT(textureAlignment, TEXTURE_ALIGNMENT);
    FACT(texturePitchAlignment, TEXTURE_PITCH_ALIGNMENT);
    FACT(multiProcessorCount, MULTIPROCESSOR_COUNT);
    FACT(canMapHostMemory, CAN_MAP_HOST_MEMORY);
    FACT(surfaceAlignment, SURFACE_ALIGNMENT);
    FACT(concurrentKernels, CONCURRENT_KERNELS);
    FACT(ECCEnabled, ECC_ENABLED);
    FACT(pciBusID, PCI_BUS_ID);
    FACT(pciDeviceID, PCI_DEVICE_ID);
    FACT(pciDomainID, PCI_DOMAIN_ID);
    FACT(asyncEngineCount, ASYNC_ENGINE_COUNT);
    FACT(unifiedAddressing, UNIFIED_ADDRESSING);
    FACT(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH);
    FACT(l2CacheSize, L2_CACHE_SIZE);
    FACT(persistingL2CacheMaxSize, MAX_PERSISTING_L2_CACHE_SIZE);
    FACT(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR);
    FACT(streamPrioritiesSupported, STREAM_PRIORITIES_SUPPORTED);
    FACT(globalL1CacheSupported, GLOBAL_L1_CACHE_SUPPORTED);
    FACT(localL1CacheSupported, LOCAL_L1_CACHE_SUPPORTED);
    FACT(sharedMemPerMultiprocessor, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    FACT(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR);
    FACT(managedMemory, MANAGED_MEMORY);
    FACT(multiGpuBoardGroupID, MULTI_GPU_BOARD_GROUP_ID);
    FACT(concurrentManagedAccess, CONCURRENT_MANAGED_ACCESS);
    FACT(computePreemptionSupported, COMPUTE_PREEMPTION_SUPPORTED);
    FACT(canUseHostPointerForRegisteredMem, CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    FACT(cooperativeLaunch, COOPERATIVE_LAUNCH);
    FACT(sharedMemPerBlockOptin, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    FACT(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR);
    FACT(accessPolicyMaxWindowSize, MAX_ACCESS_POLICY_WINDOW_SIZE);
    FACT(reservedSharedMemPerBlock, RESERVED_SHARED_MEMORY_PER_BLOCK);
    FACT(hostRegisterSupported, HOST_REGISTER_SUPPORTED);
    FACT(hostRegisterReadOnlySupported, READ_ONLY_HOST_REGISTER_SUPPORTED);
    FACT(memoryPoolsSupported, MEMORY_POOLS_SUPPORTED);
    FACT(clusterLaunch, CLUSTER_LAUNCH);
    FACT(deviceNumaId, NUMA_ID);
#undef FACT
    p->gpuPciDeviceID = pose->pci_device_id;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    if (text == NULL || device < 0 || device >= si_device_count())
        return DONE(CUDA_ERROR_INVALID_DEVICE);
    int needed = snprintf(text, (size_t)length, "0000:%02x:00.0", si_board_index(device) + 1);
    return needed < length ? cudaSuccess : DONE(CUDA_ERROR_INVALID_VALUE);
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text)
{
    for (int i = 0; i < si_device_count(); i++) {
        char own[32];
        cudaDeviceGetPCIBusId(own, sizeof own, i);
        if (!strcasecmp(own, text) || !strcasecmp(own + 5, text)) {
            *device = i;
            return cudaSuccess;
        }
    }
    return DONE(CUDA_ERROR_INVALID_DEVICE);
}

cudaError_t cudaDeviceSynchronize(void)
{
    return si_device_count() ? cudaSuccess : DONE(CUDA_ERROR_NO_DEVICE);
}

cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned int flags) { return (void)flags, cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

cudaError_t cudaGetDeviceFlags(unsigned int *flags)
{
    *flags = cudaDeviceMapHost;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    return DONE(cuCtxGetStreamPriorityRange(least, greatest));
}

cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value)
{
    return (void)limit, (void)value, cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    int count = si_device_count();
    if (device < 0 || peer < 0 || device >= count || peer >= count)
        return DONE(CUDA_ERROR_INVALID_DEVICE);
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
    (void)flags;
    return peer >= 0 && peer < si_device_count() ? cudaSuccess : DONE(CUDA_ERROR_INVALID_DEVICE);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) { return (void)peer, cudaSuccess; }

/* ---- streams and events ---- */

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return DONE(si_stream_create(stream, 0, 0)); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return DONE(si_stream_create(stream, flags, 0));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    return DONE(si_stream_create(stream, flags, priority));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return DONE(si_stream_destroy(stream)); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = si_stream(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int *flags)
{
    *flags = si_stream(stream)->flags;
    return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
    *id = si_stream(stream)->id;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    *device = si_stream(stream)->device;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    return (void)flags, DONE(si_stream_wait(stream, event));
}

static CUresult idle(cudaStream_t stream)
{
    return si_capturing(stream) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return DONE(idle(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return DONE(idle(stream)); }

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback,
                                  void *argument, unsigned int flags)
{
    (void)flags;
    if (si_capturing(stream))
        return DONE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    callback(stream, cudaSuccess, argument);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument)
{
    return DONE(cuLaunchHostFunc(stream, function, argument));
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return DONE(si_event_create(event, 0)); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    return DONE(si_event_create(event, flags));
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return DONE(si_event_destroy(event)); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return DONE(si_event_record(event, stream));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags)
{
    return (void)flags, DONE(si_event_record(event, stream));
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return event ? cudaSuccess : DONE(CUDA_ERROR_INVALID_HANDLE);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    return DONE(si_event_elapsed(milliseconds, start, end));
}

/* ---- capture and graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    return (void)mode, DONE(si_graph_begin(stream, NULL));
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t *nodes,
                                          const cudaGraphEdgeData *edges, size_t count,
                                          enum cudaStreamCaptureMode mode)
{
    (void)nodes, (void)edges, (void)count, (void)mode;
    return DONE(si_graph_begin(stream, (struct si_graph *)graph));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    return DONE(si_graph_end(stream, graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = (enum cudaStreamCaptureStatus)si_stream(stream)->capture;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count)
{
    CUstreamCaptureStatus own;
    cuuint64_t own_id = 0;
    CUresult result = cuStreamGetCaptureInfo_v3(stream, &own, &own_id, graph, nodes,
                                                (const CUgraphEdgeData **)edges, count);
    *status = (enum cudaStreamCaptureStatus)own;
    if (id && own != CU_STREAM_CAPTURE_STATUS_NONE)
        *id = own_id;
    return DONE(result);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                const cudaGraphEdgeData *edges, size_t count,
                                                unsigned int flags)
{
    (void)nodes, (void)edges, (void)count, (void)flags;
    return si_capturing(stream) ? cudaSuccess : DONE(CUDA_ERROR_ILLEGAL_STATE);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    CUstreamCaptureMode own = (CUstreamCaptureMode)*mode;
    cuThreadExchangeStreamCaptureMode(&own);
    *mode = (enum cudaStreamCaptureMode)own;
    return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned int flags)
{
    return DONE(cuGraphCreate(graph, flags));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return DONE(cuGraphDestroy(graph)); }

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    return DONE(cuGraphGetNodes(graph, nodes, count));
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type)
{
    CUgraphNodeType own;
    cuGraphNodeGetType(node, &own);
    *type = (enum cudaGraphNodeType)own;
    return cudaSuccess;
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                  const cudaGraphNode_t *from, size_t count)
{
    return DONE(cuGraphAddEmptyNode(node, graph, from, count));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    return DONE(cuGraphInstantiateWithFlags(out, graph, flags));
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                          unsigned long long flags)
{
    return DONE(cuGraphInstantiateWithFlags(out, graph, flags));
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    return DONE(cuGraphLaunch(graph, stream));
}

cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t stream)
{
    return DONE(cuGraphUpload(graph, stream));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return DONE(cuGraphExecDestroy(graph)); }

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *argument, cudaHostFn_t destroy,
                                 unsigned int references, unsigned int flags)
{
    return DONE(cuUserObjectCreate(object, argument, destroy, references, flags));
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count)
{
    return DONE(cuUserObjectRelease(object, count));
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned int count, unsigned int flags)
{
    return DONE(cuGraphRetainUserObject(graph, object, count, flags));
}

/* ---- driver entry points ---- */

static cudaError_t entry_point(const char *symbol, void **function,
                               enum cudaDriverEntryPointQueryResult *status)
{
    if (symbol == NULL || function == NULL)
        return DONE(CUDA_ERROR_INVALID_VALUE);
    *function = si_driver_function(symbol);
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* Dropped from the 13.x headers, still asked for by code that was built with 12.x. */
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status)
{
    return (void)flags, entry_point(symbol, function, status);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function,
                                             unsigned int version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status)
{
    (void)version, (void)flags;
    return entry_point(symbol, function, status);
}
