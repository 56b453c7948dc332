/* The runtime's files keep one last error per thread. */
#ifndef STANDIN_RUNTIME_H
#define STANDIN_RUNTIME_H

#include "standin.h"

#pragma GCC visibility push(hidden)
/* Records a failure as the thread's last error; driver and runtime codes are the same. */
cudaError_t si_done(CUresult result);
#pragma GCC visibility pop

#define DONE(expression) si_done(expression)

#endif
