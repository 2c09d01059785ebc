/*
 * dsrun.hpp: helpers for backends in C++. They convert exceptions to statuses, because no exception may leave a function of a
 * plugin.
 *
 * Wrap the body of every function in the plugin's tables:
 *
 *     static dsr_status *allocate(dsr_device *, uint64_t bytes, uint32_t kind, dsr_buffer **buffer) noexcept {
 *         return dsr::guard(host, [&] {
 *             if (kind != DSR_MEMORY_DEVICE && kind != DSR_MEMORY_PINNED) {
 *                 throw dsr::error(DSR_CODE_UNSUPPORTED, "is not a kind of memory").at("kind");
 *             }
 *             *buffer = reinterpret_cast<dsr_buffer *>(new char[bytes]());
 *         });
 *     }
 *
 * dsr::check turns an error of the host into an exception, which the guard returns as the same error.
 */

#ifndef DSRUN_HPP
#define DSRUN_HPP

#include "dsrun.h"

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

namespace dsr {

/* Conversions between dsr_str and std::string_view, which do not copy the text. */
inline dsr_str text_of(std::string_view text) noexcept { return dsr_str{text.data(), text.size()}; }
inline std::string_view view_of(dsr_str text) noexcept {
    return text.length == 0 ? std::string_view() : std::string_view(text.data, text.length);
}

/* An error with a code of DSR_CODE_*. */
class error : public std::exception {
public:
    error(uint32_t code, std::string message) : code_(code), message_(std::move(message)) {}

    /* Names the op at fault. */
    error &in_op(std::string op) {
        op_ = std::move(op);
        return *this;
    }

    /* Names the argument (operand, result or parameter) at fault. */
    error &at(std::string argument) {
        argument_ = std::move(argument);
        return *this;
    }

    /* Names the field of the argument at fault. */
    error &field(std::string field) {
        field_ = std::move(field);
        return *this;
    }

    const char *what() const noexcept override { return message_.c_str(); }

    dsr_status *status(const dsr_host_api *host) const noexcept {
        const dsr_error error = {static_cast<uint32_t>(sizeof(dsr_error)),
                                 code_,
                                 text_of(message_),
                                 text_of(op_),
                                 text_of(argument_),
                                 text_of(field_)};
        return host->status_new(host->host, &error);
    }

private:
    uint32_t code_;
    std::string message_, op_, argument_, field_;
};

/* An error of the host as an exception. */
class host_error : public std::exception {
public:
    host_error(const dsr_host_api *host, dsr_status *status)
        : status_(status, [host](dsr_status *owned) { host->status_free(host->host, owned); }), host_(host) {}

    const char *what() const noexcept override { return "an error of the host"; }

    dsr_status *status() const noexcept {
        dsr_error copy = {};
        copy.struct_size = static_cast<uint32_t>(sizeof(dsr_error));
        host_->status_get(host_->host, status_.get(), &copy);
        return host_->status_new(host_->host, &copy);
    }

private:
    std::shared_ptr<dsr_status> status_;
    const dsr_host_api *host_;
};

/* Throws if the host has returned an error. */
inline void check(const dsr_host_api *host, dsr_status *status) {
    if (status != nullptr) {
        throw host_error(host, status);
    }
}

/* Runs the body of a function of the plugin. An exception other than dsr::error is a bug, after which the host stops using the
 * object. */
template <typename Body>
dsr_status *guard(const dsr_host_api *host, Body &&body) noexcept {
    try {
        std::forward<Body>(body)();
        return nullptr;
    } catch (const error &known) {
        return known.status(host);
    } catch (const host_error &known) {
        return known.status();
    } catch (const std::bad_alloc &) {
        return dsr_fail(host, DSR_CODE_OUT_OF_MEMORY, "host memory is exhausted");
    } catch (const std::exception &unexpected) {
        return dsr_fail(host, DSR_CODE_PANIC, unexpected.what());
    } catch (...) {
        return dsr_fail(host, DSR_CODE_PANIC, "an exception without a message");
    }
}

} // namespace dsr

#endif /* DSRUN_HPP */
