/* Streams and events.  Nothing runs, so every stream is idle and every event is done; an
 * event keeps the host's time, which makes an elapsed time the true one of this machine. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <time.h>

struct event {
    unsigned flags;
    bool recorded;
    struct timespec when;
    struct si_graph *graph;
    unsigned long long capture_id;
};

static struct si_stream defaults[SI_MAX_DEVICES];
static unsigned long long next_stream = 1;

struct si_stream *si_stream(CUstream handle)
{
    uintptr_t value = (uintptr_t)handle;
    if (value > 2)
        return (struct si_stream *)handle;
    struct si_stream *stream = &defaults[si_current_device()];
    stream->device = si_current_device();
    return stream;
}

CUresult si_stream_create(CUstream *out, unsigned flags, int priority)
{
    if (out == NULL || (flags & ~1u))
        return CUDA_ERROR_INVALID_VALUE;
    if (si_pose() == NULL)
        return CUDA_ERROR_NO_DEVICE;
    struct si_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream->device = si_current_device();
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    stream->id = __atomic_add_fetch(&next_stream, 1, __ATOMIC_RELAXED);
    *out = (CUstream)stream;
    return CUDA_SUCCESS;
}

CUresult si_stream_destroy(CUstream handle)
{
    if ((uintptr_t)handle <= 2)
        return CUDA_ERROR_INVALID_HANDLE;
    free(si_stream(handle));
    return CUDA_SUCCESS;
}

CUresult si_event_create(CUevent *out, unsigned flags)
{
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (si_pose() == NULL)
        return CUDA_ERROR_NO_DEVICE;
    struct event *event = calloc(1, sizeof *event);
    if (event == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->flags = flags;
    *out = (CUevent)event;
    return CUDA_SUCCESS;
}

CUresult si_event_destroy(CUevent handle)
{
    if (handle == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    free(handle);
    return CUDA_SUCCESS;
}

CUresult si_event_record(CUevent handle, CUstream stream_handle)
{
    if (handle == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    struct event *event = (struct event *)handle;
    struct si_stream *stream = si_stream(stream_handle);
    event->graph = si_capturing(stream_handle) ? stream->graph : NULL;
    event->capture_id = event->graph ? stream->capture_id : 0;
    event->recorded = true;
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    return CUDA_SUCCESS;
}

/* Waiting for an event of a captured stream makes the waiting stream part of the capture. */
CUresult si_stream_wait(CUstream handle, CUevent event_handle)
{
    if (event_handle == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    struct event *event = (struct event *)event_handle;
    struct si_stream *stream = si_stream(handle);
    if (event->graph == NULL || si_capturing(handle))
        return CUDA_SUCCESS;
    return si_graph_join(stream, event->graph, event->capture_id);
}

CUresult si_event_elapsed(float *milliseconds, CUevent start_handle, CUevent end_handle)
{
    struct event *start = (struct event *)start_handle, *end = (struct event *)end_handle;
    if (start == NULL || end == NULL || milliseconds == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    unsigned untimed = CU_EVENT_DISABLE_TIMING;
    if (!start->recorded || !end->recorded || ((start->flags | end->flags) & untimed))
        return CUDA_ERROR_INVALID_HANDLE;
    double seconds = (double)(end->when.tv_sec - start->when.tv_sec) +
                     1e-9 * (double)(end->when.tv_nsec - start->when.tv_nsec);
    *milliseconds = (float)(seconds * 1e3);
    return CUDA_SUCCESS;
}
