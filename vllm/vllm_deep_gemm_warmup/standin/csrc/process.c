/* Programs that are not Python (nvcc, a shell, ninja, gcc) get a clean environment for
 * their children: what they print and decide must be what they would without us. */
#define _GNU_SOURCE
#include "standin.h"

#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool python(void)
{
    char path[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length <= 0)
        return false;
    path[length] = '\0';
    return strncmp(basename(path), "python", 6) == 0;
}

/* Drops every entry of a list variable that lies in the stand-in's folder. */
static void strip(const char *variable, const char *separators, const char *folder)
{
    const char *value = getenv(variable);
    if (value == NULL)
        return;
    char *copy = strdup(value), *kept = calloc(1, strlen(value) + 1), *rest = NULL;
    if (copy == NULL || kept == NULL)
        return;
    size_t length = strlen(folder);
    for (char *entry = strtok_r(copy, separators, &rest); entry;
         entry = strtok_r(NULL, separators, &rest)) {
        if (!strncmp(entry, folder, length) && (entry[length] == '/' || entry[length] == '\0'))
            continue;
        if (*kept)
            strcat(kept, ":");
        strcat(kept, entry);
    }
    if (*kept)
        setenv(variable, kept, 1);
    else
        unsetenv(variable);
    free(copy);
    free(kept);
}

__attribute__((constructor)) static void leave_other_programs(void)
{
    if (python())
        return;
    const char *folder = getenv("STANDIN_GPU_FOLDER");
    if (folder == NULL || *folder == '\0')
        return;
    char own[PATH_MAX];
    snprintf(own, sizeof own, "%s", folder);
    strip("LD_PRELOAD", ": ", own);
    strip("LD_LIBRARY_PATH", ":", own);
    unsetenv("STANDIN_GPU");
    unsetenv("STANDIN_GPU_FOLDER");
    unsetenv("STANDIN_GPU_TRACE");
}
