/* cuBLAS, cuBLASLt, cuSPARSE, cuSOLVER, cuDNN, cuFFT, cuRAND: calls succeed and compute
 * nothing.  The real libraries would look for a driver by private doors.  Here are the few
 * whose answer the host uses; build.py writes the others (see generate.py). */
#define _GNU_SOURCE
#include "standin.h"

#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

struct blas {
    int math_mode, pointer_mode, atomics_mode;
    cudaStream_t stream;
};

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle)
{
    if (si_pose() == NULL)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof(struct blas));
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    ((struct blas *)handle)->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream)
{
    *stream = ((struct blas *)handle)->stream;
    return CUBLAS_STATUS_SUCCESS;
}

/* A product in a captured stream is a node of the graph, or the graph would look empty. */
void si_blas_called(void *handle)
{
    if (handle)
        si_recorded(((struct blas *)handle)->stream);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                              const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    (void)handle, (void)operation, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout;
    (void)beta, (void)c, (void)c_layout, (void)d, (void)d_layout, (void)algorithm;
    (void)workspace, (void)workspace_bytes;
    si_recorded(stream);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
    ((struct blas *)handle)->math_mode = (int)mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode)
{
    *mode = (cublasMath_t)((struct blas *)handle)->math_mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode)
{
    ((struct blas *)handle)->pointer_mode = (int)mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode)
{
    *mode = (cublasPointerMode_t)((struct blas *)handle)->pointer_mode;
    return CUBLAS_STATUS_SUCCESS;
}

/* cuBLASLt descriptors are opaque to the caller and unused by a product that is not made. */
#define OPAQUE(Type, name)                                                                         \
    static cublasStatus_t create_##name(Type *out)                                                 \
    {                                                                                              \
        *out = calloc(1, 256);                                                                     \
        return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;                          \
    }

OPAQUE(cublasLtHandle_t, handle)
OPAQUE(cublasLtMatmulDesc_t, operation)
OPAQUE(cublasLtMatrixLayout_t, layout)
OPAQUE(cublasLtMatmulPreference_t, preference)

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return create_handle(handle); }

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    return (void)compute, (void)scale, create_operation(out);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor)
{
    free(descriptor);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t leading)
{
    return (void)type, (void)rows, (void)columns, (void)leading, create_layout(out);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out)
{
    return create_preference(out);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

/* One algorithm without workspace: callers stop when there is none. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int requested, cublasLtMatmulHeuristicResult_t results[],
    int *returned)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    if (requested < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    memset(&results[0], 0, sizeof results[0]);
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1.0f;
    *returned = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algorithm,
                                       cublasLtMatmulHeuristicResult_t *result)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d;
    memset(result, 0, sizeof *result);
    result->algo = *algorithm;
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}
