/* Entry-point look-ups by name.  They never fail: a name without a function here gets one
 * that answers "not supported". */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <string.h>

/* Written by build.py from cuda.h and driver_types.h. */
struct si_alias {
    const char *name, *symbol;
};
struct si_error {
    int code;
    const char *name;
};
extern const struct si_alias si_aliases[] __attribute__((visibility("hidden")));
extern const struct si_error si_errors[] __attribute__((visibility("hidden")));

static int nameless(void) { return si_unsupported("a function looked up by name"); }

static void *own(const char *name)
{
    static void *self;
    if (self == NULL) {
        Dl_info info;
        if (dladdr((void *)&si_trace, &info))
            self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    return self ? dlsym(self, name) : NULL;
}

void *si_driver_function(const char *name)
{
    const char *symbol = name;
    for (const struct si_alias *alias = si_aliases; alias->name; alias++)
        if (!strcmp(alias->name, name))
            symbol = alias->symbol;
    void *function = own(symbol);
    if (function)
        return function;
    si_trace("looked up %s, which has no function here", name);
    return (void *)nameless;
}

const char *si_error_name(int code)
{
    for (const struct si_error *error = si_errors; error->name; error++)
        if (error->code == code)
            return error->name;
    return "unrecognized error code";
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    (void)version, (void)flags;
    if (name == NULL || function == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *function = si_driver_function(name);
    if (status)
        *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

/* cuda.h renames the old one; code built with older headers still links to it. */
#undef cuGetProcAddress
CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
