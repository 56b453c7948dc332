/* CUDA graphs.  A capture counts what it records; a launch runs the host functions in it
 * and nothing else, because device memory has no meaning here. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>

#define JOINED_MAX 64

struct node {
    CUgraphNodeType type;
    CUhostFn function;
    void *argument;
};

struct user_object {
    CUhostFn destroy;
    void *argument;
    int references;
};

struct si_graph {
    struct node **nodes;
    size_t count, room;
    struct user_object **objects;
    size_t object_count;
    struct si_stream *streams[JOINED_MAX];
    size_t stream_count;
    bool capturing;
};

/* An executable shares the nodes' host functions by value. */
struct executable {
    struct node *nodes;
    size_t count;
};

static unsigned long long next_capture = 1;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static struct node *add_node(struct si_graph *graph, CUgraphNodeType type)
{
    if (graph->count == graph->room) {
        size_t room = graph->room ? graph->room * 2 : 32;
        struct node **grown = realloc(graph->nodes, room * sizeof *grown);
        if (grown == NULL)
            return NULL;
        graph->nodes = grown;
        graph->room = room;
    }
    struct node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return NULL;
    node->type = type;
    graph->nodes[graph->count++] = node;
    return node;
}

bool si_capturing(CUstream handle)
{
    return si_stream(handle)->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

bool si_recorded(CUstream handle)
{
    if (!si_capturing(handle))
        return false;
    add_node(si_stream(handle)->graph, CU_GRAPH_NODE_TYPE_KERNEL);
    return true;
}

CUresult si_graph_join(struct si_stream *stream, struct si_graph *graph, unsigned long long id)
{
    /* The capture that the event belonged to may be over: then it is an ordinary wait. */
    bool active = graph->capturing && graph->stream_count > 0 && graph->streams[0]->capture_id == id;
    if (!active)
        return CUDA_SUCCESS;
    if (graph->stream_count == JOINED_MAX)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    graph->streams[graph->stream_count++] = stream;
    stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    stream->capture_id = id;
    stream->graph = graph;
    return CUDA_SUCCESS;
}

CUresult si_graph_begin(CUstream handle, struct si_graph *graph)
{
    struct si_stream *stream = si_stream(handle);
    if (stream->capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (graph == NULL)
        graph = calloc(1, sizeof *graph);
    if (graph == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    graph->capturing = true;
    graph->streams[0] = stream;
    graph->stream_count = 1;
    stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    stream->capture_id = __atomic_add_fetch(&next_capture, 1, __ATOMIC_RELAXED);
    stream->graph = graph;
    return CUDA_SUCCESS;
}

CUresult si_graph_end(CUstream handle, CUgraph *out)
{
    struct si_stream *stream = si_stream(handle);
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct si_graph *graph = stream->graph;
    if (graph->streams[0] != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    for (size_t i = 0; i < graph->stream_count; i++) {
        graph->streams[i]->capture = CU_STREAM_CAPTURE_STATUS_NONE;
        graph->streams[i]->graph = NULL;
    }
    graph->stream_count = 0;
    graph->capturing = false;
    *out = (CUgraph)graph;
    return CUDA_SUCCESS;
}

static void release(struct user_object *object, int count)
{
    if (__atomic_sub_fetch(&object->references, count, __ATOMIC_ACQ_REL) > 0)
        return;
    if (object->destroy)
        object->destroy(object->argument);
    free(object);
}

/* ---- driver names; the runtime's below answer with the same code ---- */

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    (void)mode;
    return si_graph_begin(stream, NULL);
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *nodes,
                                     const CUgraphEdgeData *edges, size_t count,
                                     CUstreamCaptureMode mode)
{
    (void)nodes, (void)edges, (void)count, (void)mode;
    return si_graph_begin(stream, (struct si_graph *)graph);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) { return si_graph_end(stream, graph); }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    *status = si_stream(stream)->capture;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status,
                                   cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                                   const CUgraphEdgeData **edges, size_t *count)
{
    struct si_stream *stream = si_stream(handle);
    *status = stream->capture;
    if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_SUCCESS;
    if (id)
        *id = stream->capture_id;
    if (graph)
        *graph = (CUgraph)stream->graph;
    if (nodes)
        *nodes = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status,
                                   cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                                   size_t *count)
{
    return cuStreamGetCaptureInfo_v3(handle, status, id, graph, nodes, NULL, count);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode *nodes,
                                              const CUgraphEdgeData *edges, size_t count,
                                              unsigned int flags)
{
    (void)nodes, (void)edges, (void)count, (void)flags;
    return si_capturing(stream) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode previous = thread_mode;
    thread_mode = *mode;
    *mode = previous;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    if (!si_capturing(stream)) {
        function(argument);
        return CUDA_SUCCESS;
    }
    struct node *node = add_node(si_stream(stream)->graph, CU_GRAPH_NODE_TYPE_HOST);
    if (node == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->function = function;
    node->argument = argument;
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    (void)flags;
    *graph = calloc(1, sizeof(struct si_graph));
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphDestroy(CUgraph handle)
{
    struct si_graph *graph = (struct si_graph *)handle;
    if (graph == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < graph->count; i++)
        free(graph->nodes[i]);
    for (size_t i = 0; i < graph->object_count; i++)
        release(graph->objects[i], 1);
    free(graph->nodes);
    free(graph->objects);
    free(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    struct si_graph *graph = (struct si_graph *)handle;
    if (nodes == NULL) {
        *count = graph->count;
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < *count; i++)
        nodes[i] = i < graph->count ? (CUgraphNode)graph->nodes[i] : NULL;
    if (*count > graph->count)
        *count = graph->count;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    *type = ((struct node *)node)->type;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count)
{
    (void)from, (void)count;
    *node = (CUgraphNode)add_node((struct si_graph *)graph, CU_GRAPH_NODE_TYPE_EMPTY);
    return *node ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph handle, unsigned long long flags)
{
    (void)flags;
    struct si_graph *graph = (struct si_graph *)handle;
    struct executable *executable = calloc(1, sizeof *executable);
    if (executable == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < graph->count; i++)
        executable->count += graph->nodes[i]->function != NULL;
    executable->nodes = calloc(executable->count + 1, sizeof *executable->nodes);
    for (size_t i = 0, j = 0; executable->nodes && i < graph->count; i++)
        if (graph->nodes[i]->function)
            executable->nodes[j++] = *graph->nodes[i];
    *out = (CUgraphExec)executable;
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream)
{
    struct executable *executable = (struct executable *)handle;
    if (executable == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (si_recorded(stream))
        return CUDA_SUCCESS;
    for (size_t i = 0; i < executable->count; i++)
        executable->nodes[i].function(executable->nodes[i].argument);
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec executable, CUstream stream)
{
    (void)stream;
    return executable ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecDestroy(CUgraphExec handle)
{
    struct executable *executable = (struct executable *)handle;
    if (executable == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    free(executable->nodes);
    free(executable);
    return CUDA_SUCCESS;
}

CUresult cuUserObjectCreate(CUuserObject *out, void *argument, CUhostFn destroy,
                            unsigned int references, unsigned int flags)
{
    (void)flags;
    struct user_object *object = calloc(1, sizeof *object);
    if (object == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    object->destroy = destroy;
    object->argument = argument;
    object->references = (int)references;
    *out = (CUuserObject)object;
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count)
{
    release((struct user_object *)object, (int)count);
    return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph handle, CUuserObject object_handle, unsigned int count,
                                 unsigned int flags)
{
    struct si_graph *graph = (struct si_graph *)handle;
    struct user_object *object = (struct user_object *)object_handle;
    size_t room = graph->object_count + count;
    struct user_object **grown = realloc(graph->objects, room * sizeof *grown);
    if (grown == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    graph->objects = grown;
    for (unsigned i = 0; i < count; i++)
        graph->objects[graph->object_count++] = object;
    if (!(flags & CU_GRAPH_USER_OBJECT_MOVE))
        __atomic_add_fetch(&object->references, (int)count, __ATOMIC_ACQ_REL);
    return CUDA_SUCCESS;
}
