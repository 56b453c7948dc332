/* NCCL: every rank believes that the others answered.  What the host reads (rank, count,
 * version, handles) is right; no byte moves between ranks. */
#define _GNU_SOURCE
#include <nccl.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct communicator {
    int count, rank, device;
};

static __thread int device_hint;

static ncclResult_t make(ncclComm_t *out, int count, int rank)
{
    struct communicator *communicator = calloc(1, sizeof *communicator);
    if (communicator == NULL)
        return ncclSystemError;
    *communicator = (struct communicator){count, rank, device_hint};
    *out = (ncclComm_t)communicator;
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    long parts[3] = {getpid(), now.tv_sec, now.tv_nsec};
    memset(id, 0, sizeof *id);
    memcpy(id, parts, sizeof parts);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclSuccess ? "no error" : "error on the stand-in device";
}

const char *ncclGetLastError(ncclComm_t communicator) { return (void)communicator, ""; }

ncclResult_t ncclCommInitRank(ncclComm_t *out, int count, ncclUniqueId id, int rank)
{
    return (void)id, make(out, count, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int count, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    return (void)id, (void)config, make(out, count, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int count, int rank, int ids,
                                      ncclUniqueId *id, ncclConfig_t *config)
{
    return (void)ids, (void)id, (void)config, make(out, count, rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t *out, int count, const int *devices)
{
    (void)devices;
    for (int rank = 0; rank < count; rank++)
        if (make(&out[rank], count, rank) != ncclSuccess)
            return ncclSystemError;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator)
{
    free(communicator);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) { return ncclCommDestroy(communicator); }

ncclResult_t ncclCommCount(const ncclComm_t communicator, int *count)
{
    *count = ((struct communicator *)communicator)->count;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int *rank)
{
    *rank = ((struct communicator *)communicator)->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t communicator, int *device)
{
    *device = ((struct communicator *)communicator)->device;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *result)
{
    (void)communicator;
    *result = ncclSuccess;
    return ncclSuccess;
}

/* No window or registration exists: callers fall back to plain calls. */
ncclResult_t ncclCommRegister(const ncclComm_t communicator, void *buffer, size_t size,
                              void **handle)
{
    (void)communicator, (void)buffer, (void)size;
    *handle = NULL;
    return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config)
{
    (void)communicator, (void)color, (void)key, (void)out, (void)config;
    return ncclInvalidUsage;
}
