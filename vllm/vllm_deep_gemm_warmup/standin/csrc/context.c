/* Which device and context a thread works on.  A primary context is a token per device. */
#include "standin.h"

static __thread int current_ordinal;
static __thread CUcontext current_context;
static char primary[SI_MAX_DEVICES];
static int primary_references[SI_MAX_DEVICES];

int si_current_device(void) { return current_ordinal; }

CUresult si_set_device(int ordinal)
{
    if (si_device_count() == 0)
        return CUDA_ERROR_NO_DEVICE;
    if (ordinal < 0 || ordinal >= si_device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    current_ordinal = ordinal;
    current_context = (CUcontext)&primary[ordinal];
    __atomic_store_n(&primary_references[ordinal], 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

static int ordinal_of(CUcontext context)
{
    char *token = (char *)context;
    return token >= primary && token < primary + SI_MAX_DEVICES ? (int)(token - primary) : -1;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= si_device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    __atomic_store_n(&primary_references[device], 1, __ATOMIC_RELAXED);
    *context = (CUcontext)&primary[device];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return device < 0 || device >= si_device_count() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
    (void)flags;
    return device < 0 || device >= si_device_count() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    if (device < 0 || device >= si_device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    if (flags)
        *flags = 0;
    if (active)
        *active = __atomic_load_n(&primary_references[device], __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = current_context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    if (context != NULL) {
        int ordinal = ordinal_of(context);
        if (ordinal < 0)
            return CUDA_ERROR_INVALID_CONTEXT;
        current_ordinal = ordinal;
    }
    current_context = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    if (current_context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        *context = current_context;
    current_context = NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    if (current_context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = ordinal_of(current_context);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags)
{
    *flags = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    int ordinal = ordinal_of(context ? context : current_context);
    if (ordinal < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *id = (unsigned long long)ordinal + 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    (void)limit, (void)value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}
