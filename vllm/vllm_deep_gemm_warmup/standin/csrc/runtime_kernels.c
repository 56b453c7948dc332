/* The CUDA runtime: compiled-in code (registration), kernels, launches. */
#define _GNU_SOURCE
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct variable {
    const void *host;
    size_t size;
    void *address;
    bool managed;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct variable *variables;
static size_t variable_count, variable_room;
static char registered_image[64];

void **__cudaRegisterFatBinary(void *image)
{
    (void)image;
    return (void **)registered_image;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return (void)handle, 1; }

static void add_variable(const void *host, size_t size, bool managed)
{
    pthread_mutex_lock(&lock);
    if (variable_count == variable_room) {
        size_t room = variable_room ? variable_room * 2 : 256;
        struct variable *grown = realloc(variables, room * sizeof *grown);
        if (grown) {
            variables = grown;
            variable_room = room;
        }
    }
    if (variable_count < variable_room)
        variables[variable_count++] = (struct variable){host, size, NULL, managed};
    pthread_mutex_unlock(&lock);
}

void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external,
                       size_t size, int constant, int global)
{
    (void)handle, (void)address, (void)name, (void)external, (void)constant, (void)global;
    add_variable(host, size, false);
}

void __cudaRegisterManagedVar(void **handle, void **host, char *address, const char *name,
                              int external, size_t size, int constant, int global)
{
    (void)handle, (void)address, (void)name, (void)external, (void)constant, (void)global;
    add_variable(host, size, true);
}

void __cudaRegisterHostVar(void **handle, const char *name, char *host, size_t size)
{
    (void)handle, (void)name, (void)host, (void)size;
}

void __cudaRegisterTexture(void **handle, const void *host, const void **address, const char *name,
                           int dimensions, int normalized, int external)
{
    (void)handle, (void)host, (void)address, (void)name;
    (void)dimensions, (void)normalized, (void)external;
}

void __cudaRegisterSurface(void **handle, const void *host, const void **address, const char *name,
                           int dimensions, int external)
{
    (void)handle, (void)host, (void)address, (void)name, (void)dimensions, (void)external;
}

static CUresult find_variable(const void *host, void **address, size_t *size)
{
    CUresult result = (CUresult)cudaErrorInvalidSymbol;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < variable_count; i++) {
        struct variable *variable = &variables[i];
        if (variable->host != host)
            continue;
        result = CUDA_SUCCESS;
        if (variable->address == NULL && variable->size)
            result = si_alloc(variable->managed ? SI_MANAGED : SI_DEVICE, si_current_device(),
                              variable->size, 0, &variable->address);
        if (address)
            *address = variable->address;
        if (size)
            *size = variable->size;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    return DONE(find_variable(symbol, address, NULL));
}

cudaError_t cudaGetSymbolSize(size_t *size, const void *symbol)
{
    return DONE(find_variable(symbol, NULL, size));
}

cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes,
                                    size_t offset, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    void *address;
    size_t size;
    (void)kind;
    CUresult result = find_variable(symbol, &address, &size);
    if (result == CUDA_SUCCESS && (offset > size || bytes > size - offset))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && !si_recorded(stream))
        si_copy((char *)address + offset, from, bytes);
    return DONE(result);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind)
{
    return cudaMemcpyToSymbolAsync(symbol, from, bytes, offset, kind, NULL);
}

cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset,
                                 enum cudaMemcpyKind kind)
{
    void *address;
    size_t size;
    (void)kind;
    CUresult result = find_variable(symbol, &address, &size);
    if (result == CUDA_SUCCESS && (offset > size || bytes > size - offset))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        si_copy(to, (char *)address + offset, bytes);
    return DONE(result);
}

/* ---- launches ---- */

struct configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};

static __thread struct configuration pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                     struct CUstream_st *stream)
{
    pushed = (struct configuration){grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}

static CUresult launch(const void *function, dim3 grid, dim3 block, size_t shared,
                       cudaStream_t stream)
{
    struct si_kernel *kernel = si_kernel_of(function);
    if (kernel == NULL)
        return (CUresult)cudaErrorInvalidDeviceFunction;
    CUresult result = si_check_launch(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                      (unsigned)shared);
    if (result == CUDA_SUCCESS)
        si_recorded(stream);
    return result;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream)
{
    return (void)arguments, DONE(launch(function, grid, block, shared, stream));
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block,
                                        void **arguments, size_t shared, cudaStream_t stream)
{
    return (void)arguments, DONE(launch(function, grid, block, shared, stream));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **arguments)
{
    (void)arguments;
    return DONE(launch(function, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream));
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t stream)
{
    return (void)arguments, DONE(launch(kernel, grid, block, shared, stream));
}

cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t stream)
{
    return (void)arguments, DONE(launch(kernel, grid, block, shared, stream));
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)si_kernel_of(function);
    return *kernel ? cudaSuccess : DONE((CUresult)cudaErrorInvalidDeviceFunction);
}

cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    return __cudaGetKernel(kernel, function);
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t *out, const void *function)
{
    return __cudaGetKernel((cudaKernel_t *)out, function);
}

cudaError_t cudaFuncGetName(const char **name, const void *function)
{
    struct si_kernel *kernel = si_kernel_of(function);
    if (kernel == NULL)
        return DONE((CUresult)cudaErrorInvalidDeviceFunction);
    *name = kernel->name;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    struct si_kernel *kernel = si_kernel_of(function);
    if (kernel == NULL)
        return DONE((CUresult)cudaErrorInvalidDeviceFunction);
    memset(attributes, 0, sizeof *attributes);
    int architecture = si_pose()->major * 10 + si_pose()->minor;
    attributes->sharedSizeBytes = (size_t)kernel->static_shared;
    attributes->localSizeBytes = (size_t)kernel->local_bytes;
    attributes->maxThreadsPerBlock = kernel->max_threads;
    attributes->numRegs = kernel->registers;
    attributes->ptxVersion = architecture;
    attributes->binaryVersion = architecture;
    attributes->maxDynamicSharedSizeBytes = kernel->max_dynamic_shared;
    attributes->preferredShmemCarveout = -1;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    struct si_kernel *kernel = si_kernel_of(function);
    if (kernel == NULL)
        return DONE((CUresult)cudaErrorInvalidDeviceFunction);
    return DONE(si_kernel_set(kernel, (int)attribute, value));
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute,
                                            int value, int device)
{
    return (void)device, cudaFuncSetAttribute(kernel, attribute, value);
}

cudaError_t cudaFuncSetCacheConfig(const void *function, enum cudaFuncCache config)
{
    return (void)function, (void)config, cudaSuccess;
}

/* ---- occupancy: by threads, shared memory and, where known, registers ---- */

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *function,
                                                                   int threads, size_t shared,
                                                                   unsigned int flags)
{
    (void)flags;
    *blocks = si_occupancy(si_kernel_of(function), threads, shared);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                          int threads, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared,
                                                                  0);
}

/* ---- libraries ---- */

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *image,
                                enum cudaJitOption *options, void **values, unsigned int count,
                                enum cudaLibraryOption *library_options, void **library_values,
                                unsigned int library_count)
{
    (void)options, (void)values, (void)count;
    (void)library_options, (void)library_values, (void)library_count;
    return DONE(cuLibraryLoadData((CUlibrary *)library, image, NULL, NULL, 0, NULL, NULL, 0));
}

cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t *library, const char *path,
                                    enum cudaJitOption *options, void **values, unsigned int count,
                                    enum cudaLibraryOption *library_options, void **library_values,
                                    unsigned int library_count)
{
    (void)options, (void)values, (void)count;
    (void)library_options, (void)library_values, (void)library_count;
    return DONE(cuLibraryLoadFromFile((CUlibrary *)library, path, NULL, NULL, 0, NULL, NULL, 0));
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    return DONE(cuLibraryUnload((CUlibrary)library));
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    return DONE(cuLibraryGetKernel((CUkernel *)kernel, (CUlibrary)library, name));
}

cudaError_t cudaLibraryGetKernelCount(unsigned int *count, cudaLibrary_t library)
{
    return DONE(cuLibraryGetKernelCount(count, (CUlibrary)library));
}

cudaError_t cudaLibraryEnumerateKernels(cudaKernel_t *kernels, unsigned int count,
                                        cudaLibrary_t library)
{
    return DONE(cuLibraryEnumerateKernels((CUkernel *)kernels, count, (CUlibrary)library));
}
