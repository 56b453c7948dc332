/* Traces go to the file that STANDIN_GPU_TRACE names and nowhere else: DeepGEMM hashes
 * what `nvcc --version 2>&1` prints, so one line on a terminal would change its keys. */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void si_trace(const char *format, ...)
{
    const char *path = getenv("STANDIN_GPU_TRACE");
    if (path == NULL || *path == '\0')
        return;
    char line[512];
    int used = snprintf(line, sizeof line, "%d ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(line + used, sizeof line - used - 1, format, arguments);
    va_end(arguments);
    if (more < 0)
        return;
    used += more;
    if (used > (int)sizeof line - 2)
        used = sizeof line - 2;
    line[used++] = '\n';
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0)
        return;
    /* One write per line, so that lines of several processes do not mix. */
    ssize_t written = write(file, line, used);
    (void)written;
    close(file);
}

int si_unsupported(const char *function)
{
    si_trace("unsupported %s", function);
    return CUDA_ERROR_NOT_SUPPORTED;
}
