/* NVML: enough for a framework to find its platform.  A function that is not here is
 * missing from the library, which callers of NVML know how to read. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdio.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9 };

/* Layouts of nvml.h, which no package brings. */
struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct pci {
    char legacy_id[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char id[32];
};

static char tokens[SI_MAX_DEVICES];

static int board_of(const void *handle)
{
    const char *token = handle;
    return token >= tokens && token < tokens + SI_MAX_DEVICES ? (int)(token - tokens) : -1;
}

static int put(char *out, unsigned length, const char *text)
{
    return (size_t)snprintf(out, length, "%s", text) < length ? OK : TOO_SMALL;
}

int nvmlInit_v2(void) { return si_pose() ? OK : NO_DRIVER; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code)
{
    return code == OK              ? "Success"
           : code == NOT_SUPPORTED ? "Not Supported"
           : code == NOT_FOUND     ? "Not Found"
           : code == NO_DRIVER     ? "Driver Not Loaded"
                                   : "Invalid Argument";
}

int nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    return put(out, length, si_pose()->driver_release);
}

int nvmlSystemGetNVMLVersion(char *out, unsigned length)
{
    char text[64];
    snprintf(text, sizeof text, "%d.%s", si_pose()->driver_version / 1000,
             si_pose()->driver_release);
    return put(out, length, text);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = si_pose()->driver_version;
    return OK;
}

int nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)si_pose()->board_devices;
    return OK;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (index >= (unsigned)si_pose()->board_devices)
        return INVALID_ARGUMENT;
    *handle = &tokens[index];
    return OK;
}

int nvmlDeviceGetHandleByIndex(unsigned index, void **handle)
{
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

static void uuid_text(int board, char out[64])
{
    unsigned char b[16];
    si_uuid(board, b);
    snprintf(out, 64,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
             b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
             b[14], b[15]);
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned length)
{
    char text[64];
    if (board_of(handle) < 0)
        return INVALID_ARGUMENT;
    uuid_text(board_of(handle), text);
    return put(out, length, text);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    for (int board = 0; board < si_pose()->board_devices; board++) {
        char text[64];
        uuid_text(board, text);
        if (!strcmp(text, uuid)) {
            *handle = &tokens[board];
            return OK;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle)
{
    unsigned domain, bus;
    if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || bus < 1 ||
        bus > (unsigned)si_pose()->board_devices)
        return NOT_FOUND;
    *handle = &tokens[bus - 1];
    return OK;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index)
{
    if (board_of(handle) < 0)
        return INVALID_ARGUMENT;
    *index = (unsigned)board_of(handle);
    return OK;
}

int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor)
{
    return nvmlDeviceGetIndex(handle, minor);
}

int nvmlDeviceGetName(void *handle, char *out, unsigned length)
{
    return board_of(handle) < 0 ? INVALID_ARGUMENT : put(out, length, si_pose()->name);
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    if (board_of(handle) < 0)
        return INVALID_ARGUMENT;
    *major = si_pose()->major;
    *minor = si_pose()->minor;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *out)
{
    if (board_of(handle) < 0)
        return INVALID_ARGUMENT;
    /* What other processes hold is not known here; the board answers as an idle one. */
    *out = (struct memory){si_pose()->board_bytes, si_pose()->board_bytes, 0};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out)
{
    unsigned version = out->version;
    if (board_of(handle) < 0)
        return INVALID_ARGUMENT;
    *out = (struct memory_v2){version, si_pose()->board_bytes, 0, si_pose()->board_bytes, 0};
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out)
{
    int board = board_of(handle);
    if (board < 0)
        return INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)board + 1;
    out->pci_device = si_pose()->pci_device_id;
    snprintf(out->legacy_id, sizeof out->legacy_id, "0000:%02X:00.0", board + 1);
    snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", board + 1);
    return OK;
}

int nvmlDeviceGetPciInfo(void *handle, struct pci *out)
{
    return nvmlDeviceGetPciInfo_v3(handle, out);
}

int nvmlDeviceGetP2PStatus(void *first, void *second, int capability, int *status)
{
    (void)capability;
    if (board_of(first) < 0 || board_of(second) < 0)
        return INVALID_ARGUMENT;
    *status = 0;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out)
{
    (void)out;
    *count = 0;
    return board_of(handle) < 0 ? INVALID_ARGUMENT : OK;
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, out);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type)
{
    return (void)handle, (void)link, (void)type, NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, struct pci *out)
{
    return (void)handle, (void)link, (void)out, NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, int *active)
{
    return (void)handle, (void)link, (void)active, NOT_SUPPORTED;
}

/* The head of every version of the structure; a single node's device has no fabric. */
struct fabric {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric *out)
{
    unsigned version = out->version;
    if (board_of(handle) < 0)
        return INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    out->version = version;
    out->status = NOT_SUPPORTED;
    return OK;
}
