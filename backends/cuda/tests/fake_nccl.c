/*
 * A stand-in for NCCL, with which the backend's use of it is tested on machines without a GPU. It exchanges nothing: it checks what it is
 * given, and counts. Definitions say how it behaves:
 *
 *   VERSION        the version that it tells
 *   BUSY_POLLS     how often a new communicator says that it is in progress
 *   BUSY_CALLS     the same after an operation, which says so too
 *   INIT_STATUS    what making a communicator returns
 *   FAILURE        what a communicator says after its first operation
 */
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifndef VERSION
#define VERSION 22809
#endif
#ifndef BUSY_POLLS
#define BUSY_POLLS 0
#endif
#ifndef BUSY_CALLS
#define BUSY_CALLS 0
#endif
#ifndef INIT_STATUS
#define INIT_STATUS IN_PROGRESS
#endif
#ifndef FAILURE
#define FAILURE SUCCESS
#endif

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, IN_PROGRESS = 7 };

#define EXPORTED __attribute__((visibility("default")))
#define COUNTER EXPORTED volatile int64_t

COUNTER polls, finalized, destroyed, aborted, groups_begun, groups_ended;
/* The last operation. */
COUNTER function, from, to, count, dtype, number;

typedef struct { char bytes[128]; } UniqueId;
typedef struct { int alive, busy, failure; } Comm;
typedef struct { size_t size; unsigned magic, version; int blocking, cga_cluster_size; } Config;

static Comm comm;

EXPORTED int ncclGetVersion(int* version) {
    *version = VERSION;
    return SUCCESS;
}

EXPORTED int ncclGetUniqueId(UniqueId* id) {
    for (int i = 0; i < 128; ++i) id->bytes[i] = (char)i;
    return SUCCESS;
}

EXPORTED int ncclCommInitRankConfig(Comm** made, int ranks, UniqueId id, int rank, Config* config) {
    int known = config->size == sizeof(Config) && config->magic == 0xcafebeefu && config->version == 21400;
    int unset = config->blocking == 0 && config->cga_cluster_size == INT_MIN;
    if (!known || !unset || rank < 0 || rank >= ranks || id.bytes[127] != 127) return INVALID_ARGUMENT;
    comm = (Comm){1, BUSY_POLLS, SUCCESS};
    *made = &comm;
    return INIT_STATUS;
}

EXPORTED int ncclCommGetAsyncError(Comm* given, int* state) {
    if (given != &comm || !comm.alive) return INVALID_ARGUMENT;
    ++polls;
    *state = comm.busy > 0 ? IN_PROGRESS : comm.failure;
    if (comm.busy > 0) --comm.busy;
    return SUCCESS;
}

#ifndef WITHOUT_FINALIZE
EXPORTED int ncclCommFinalize(Comm* given) {
    ++finalized;
    return given == &comm && comm.alive ? SUCCESS : INVALID_ARGUMENT;
}
#endif

EXPORTED int ncclCommDestroy(Comm* given) {
    ++destroyed;
    given->alive = 0;
    return SUCCESS;
}

EXPORTED int ncclCommAbort(Comm* given) {
    given->alive = 0;
    ++aborted;
    return SUCCESS;
}

EXPORTED const char* ncclGetErrorString(int status) {
    static char text[] = "fake error ?";
    text[sizeof text - 2] = (char)('0' + status);
    return text;
}

EXPORTED const char* ncclGetLastError(Comm* given) {
    (void)given;
    return "the last words";
}

EXPORTED int ncclGroupStart(void) {
    ++groups_begun;
    return SUCCESS;
}

EXPORTED int ncclGroupEnd(void) {
    ++groups_ended;
    return BUSY_CALLS ? IN_PROGRESS : SUCCESS;
}

static int note(int name, uint64_t source, uint64_t target, size_t elements, int type, int which, Comm* given) {
    if (given != &comm || !comm.alive) return INVALID_ARGUMENT;
    function = name;
    from = (int64_t)source;
    to = (int64_t)target;
    count = (int64_t)elements;
    dtype = type;
    number = which;
    comm.failure = FAILURE;
    comm.busy = BUSY_CALLS;
    return BUSY_CALLS ? IN_PROGRESS : SUCCESS;
}

EXPORTED int ncclAllReduce(uint64_t s, uint64_t r, size_t n, int type, int op, Comm* given, void* stream) {
    (void)stream;
    return note(1, s, r, n, type, op, given);
}

EXPORTED int ncclAllGather(uint64_t s, uint64_t r, size_t n, int type, Comm* given, void* stream) {
    (void)stream;
    return note(2, s, r, n, type, 0, given);
}

EXPORTED int ncclReduceScatter(uint64_t s, uint64_t r, size_t n, int type, int op, Comm* given, void* stream) {
    (void)stream;
    return note(3, s, r, n, type, op, given);
}

EXPORTED int ncclBroadcast(uint64_t s, uint64_t r, size_t n, int type, int root, Comm* given, void* stream) {
    (void)stream;
    return note(4, s, r, n, type, root, given);
}

EXPORTED int ncclSend(uint64_t s, size_t n, int type, int peer, Comm* given, void* stream) {
    (void)stream;
    return note(5, s, 0, n, type, peer, given);
}

EXPORTED int ncclRecv(uint64_t r, size_t n, int type, int peer, Comm* given, void* stream) {
    (void)stream;
    return note(6, 0, r, n, type, peer, given);
}
