/* What the files of the stand-in share.  Nothing declared here is exported. */
#ifndef STANDIN_H
#define STANDIN_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SI_MAX_DEVICES 16

#pragma GCC visibility push(hidden)

/* ---- pose.c: the device that is posed, as the launcher described it ---- */

struct si_pose {
    char name[96];
    int major, minor, sm_count;
    int clock_khz, memory_clock_khz, bus_width_bits, l2_bytes;
    size_t total_bytes;        /* what cudaMemGetInfo reports as total */
    size_t board_bytes;        /* what NVML reports as total */
    unsigned pci_device_id;
    int board_devices;         /* devices in the machine, before CUDA_VISIBLE_DEVICES */
    int driver_version;        /* 13000 */
    char driver_release[32];
};

/* The device asked for, or NULL when the launcher did not start this process. */
const struct si_pose *si_pose(void);
/* Devices this process may see, after CUDA_VISIBLE_DEVICES. */
int si_device_count(void);
/* Board index behind a visible ordinal. */
int si_board_index(int ordinal);
void si_uuid(int board_index, unsigned char out[16]);
/* CUDA_SUCCESS, or CUDA_ERROR_INVALID_VALUE for an attribute nobody described. */
CUresult si_attribute(int attribute, int ordinal, int *value);

/* ---- trace.c ---- */

/* Appends one line to the file named by STANDIN_GPU_TRACE; never to a terminal. */
void si_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* 801, traced. */
int si_unsupported(const char *function);

/* ---- memory.c ---- */

/* RESERVED: an address range of the device; PEER: another process's device memory. */
enum si_kind { SI_DEVICE, SI_HOST, SI_REGISTERED, SI_MANAGED, SI_RESERVED, SI_PEER };

struct si_block {
    uintptr_t base;
    size_t size;
    enum si_kind kind;
    int device;
    unsigned flags;
    unsigned long long id;
};

CUresult si_alloc(enum si_kind kind, int device, size_t size, unsigned flags, void **out);
CUresult si_register(void *base, size_t size, unsigned flags);
CUresult si_free(void *base, enum si_kind kind);
/* Memory of a device without an address: taken, given back. */
CUresult si_take(int device, size_t size);
void si_give_back(int device, size_t size);
/* Whether the host must not follow the pointer on a real machine. */
bool si_on_device(enum si_kind kind);
bool si_find(const void *address, struct si_block *out);
void si_memory_info(int device, size_t *free_bytes, size_t *total_bytes);
void si_copy(void *to, const void *from, size_t bytes);
void si_fill(void *to, unsigned value, int width, size_t count);

/* ---- context.c: current device and context of a thread ---- */

int si_current_device(void);
CUresult si_set_device(int ordinal);

/* ---- streams.c / graphs.c ---- */

struct si_graph;

struct si_stream {
    int device, priority;
    unsigned flags;
    unsigned long long id;
    CUstreamCaptureStatus capture;
    unsigned long long capture_id;
    struct si_graph *graph;
};

/* The object behind a handle; the default streams too. */
struct si_stream *si_stream(CUstream handle);
CUresult si_stream_create(CUstream *out, unsigned flags, int priority);
CUresult si_stream_destroy(CUstream handle);
CUresult si_stream_wait(CUstream handle, CUevent event);
CUresult si_event_create(CUevent *out, unsigned flags);
CUresult si_event_record(CUevent event, CUstream stream);
CUresult si_event_destroy(CUevent event);
CUresult si_event_elapsed(float *milliseconds, CUevent start, CUevent end);
bool si_capturing(CUstream handle);
/* True, with one more node in the graph, when the stream records instead of running. */
bool si_recorded(CUstream handle);
CUresult si_graph_begin(CUstream handle, struct si_graph *graph);
CUresult si_graph_end(CUstream handle, CUgraph *out);
CUresult si_graph_join(struct si_stream *stream, struct si_graph *graph, unsigned long long id);

/* ---- modules.c ---- */

struct si_kernel {
    uint32_t magic;
    const char *name;
    void *library;
    const void *host_stub;     /* of a kernel registered by the runtime */
    int registers, static_shared, local_bytes, max_threads, max_dynamic_shared;
};

CUresult si_kernel_set(struct si_kernel *kernel, int attribute, int value);
CUresult si_kernel_get(const struct si_kernel *kernel, int attribute, int *value);
/* The kernel registered for a host stub, or for a kernel handle itself. */
struct si_kernel *si_kernel_of(const void *function);
CUresult si_check_launch(const struct si_kernel *kernel, unsigned blocks_x, unsigned blocks_y,
                         unsigned blocks_z, unsigned threads_x, unsigned threads_y,
                         unsigned threads_z, unsigned dynamic_shared);
int si_occupancy(const struct si_kernel *kernel, int threads, size_t dynamic_shared);

/* ---- math_libraries.c ---- */

/* A cuBLAS call that computes, through this handle. */
void si_blas_called(void *handle);

/* ---- lookup.c ---- */

/* The address of a driver function by its unversioned name; never NULL. */
void *si_driver_function(const char *name);
const char *si_error_name(int code);

#pragma GCC visibility pop
#endif
