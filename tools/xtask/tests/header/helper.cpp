/* Runs the guard of dsrun.hpp against a host that only remembers. */

#include "dsrun.hpp"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

struct remembered {
    uint32_t code;
    std::string message, op, argument, field;
};
static int alive = 0;

static dsr_status *status_new(dsr_host *, const dsr_error *error) {
    auto text = [](dsr_str value) { return std::string(dsr::view_of(value)); };
    alive += 1;
    return reinterpret_cast<dsr_status *>(new remembered{
        error->code, text(error->message), text(error->op), text(error->argument), text(error->field)});
}

static void status_get(dsr_host *, const dsr_status *status, dsr_error *error) {
    auto *known = reinterpret_cast<const remembered *>(status);
    error->code = known->code;
    error->message = dsr::text_of(known->message);
    error->op = dsr::text_of(known->op);
    error->argument = dsr::text_of(known->argument);
    error->field = dsr::text_of(known->field);
}

static void status_free(dsr_host *, dsr_status *status) {
    alive -= 1;
    delete reinterpret_cast<remembered *>(status);
}

static void expect(bool holds, const char *what) {
    if (!holds) {
        std::fprintf(stderr, "does not hold: %s\n", what);
        std::exit(1);
    }
}

static void expect_error(dsr_status *status, uint32_t code, const char *message, const char *argument) {
    expect(status != nullptr, "there is an error");
    auto *known = reinterpret_cast<remembered *>(status);
    expect(known->code == code, "the code");
    expect(known->message == message, known->message.c_str());
    expect(known->argument == argument, known->argument.c_str());
    status_free(nullptr, status);
    expect(alive == 0, "no error is left behind");
}

int main() {
    dsr_host_api table = {};
    table.status_new = status_new;
    table.status_get = status_get;
    table.status_free = status_free;
    const dsr_host_api *host = &table;

    int ran = 0;
    expect(dsr::guard(host, [&] { ran += 1; }) == nullptr && ran == 1, "success is null");
    expect_error(dsr::guard(host, [] { throw dsr::error(DSR_CODE_UNSUPPORTED, "no f16").in_op("linear").at("x"); }),
                 DSR_CODE_UNSUPPORTED, "no f16", "x");
    expect_error(dsr::guard(host, [] { throw std::runtime_error("a bug"); }), DSR_CODE_PANIC, "a bug", "");
    expect_error(dsr::guard(host, [] { throw 3; }), DSR_CODE_PANIC, "an exception without a message", "");
    expect_error(dsr::guard(host, [] { throw std::bad_alloc(); }), DSR_CODE_OUT_OF_MEMORY, "host memory is exhausted", "");
    expect_error(dsr::guard(host,
                            [&] {
                                dsr::check(host, nullptr);
                                dsr::check(host, dsr_fail_at(host, DSR_CODE_TIMEOUT, "rows", nullptr, "too slow"));
                            }),
                 DSR_CODE_TIMEOUT, "too slow", "rows");
    expect(DSR_HAS(host, dsr_host_api, status_new) == 0, "a table that says it is empty has nothing");
    table.struct_size = sizeof table;
    expect(DSR_HAS(host, dsr_host_api, get_extension), "a whole table has its last field");
    return 0;
}
