#if defined(_WIN32)
#define DSR_EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define DSR_EXPORT __attribute__((visibility("default")))
#else
#define DSR_EXPORT
#endif

/* Whether a struct of the other side is long enough to have a field. */
#define DSR_HAS(pointer, type, field) \
    ((pointer)->struct_size >= offsetof(type, field) + sizeof((pointer)->field))

/* A field of a struct of the other side; 0 if the struct is too short to have it. */
#define DSR_GET(pointer, type, field) (DSR_HAS(pointer, type, field) ? (pointer)->field : 0)

/* Sets a field of a struct that the other side has allocated, if the struct is long enough to have it. */
#define DSR_SET(pointer, type, field, value) \
    do { \
        if (DSR_HAS(pointer, type, field)) { \
            (pointer)->field = (value); \
        } \
    } while (0)

#ifdef __cplusplus
extern "C" {
#endif

/* The symbol that a plugin exports. The host calls it once for each load, before any other function. `host` is valid forever.
 * Sets `plugin` to a table that is valid forever. */
DSR_EXPORT dsr_status *dsrun_plugin_entry_v0(const dsr_host_api *host, const dsr_plugin_api **plugin);

/* The initialiser of a dsr_str from a string literal. */
#define DSR_TEXT(literal) {literal, sizeof(literal) - 1}

/* The dsr_str of a text that ends with a zero. */
static inline dsr_str dsr_text_of(const char *text) {
    dsr_str result = {text, 0};
    while (text != NULL && text[result.length] != '\0') {
        result.length += 1;
    }
    return result;
}

/* An error that names no argument. */
static inline dsr_status *dsr_fail(const dsr_host_api *host, uint32_t code, const char *message) {
    dsr_str none = {NULL, 0};
    dsr_error error;
    error.struct_size = (uint32_t)sizeof error;
    error.code = code;
    error.message = dsr_text_of(message);
    error.op = none;
    error.argument = none;
    error.field = none;
    return host->status_new(host->host, &error);
}

/* An error about an argument (operand, result or parameter) and a field of it; `field` may be NULL. */
static inline dsr_status *dsr_fail_at(const dsr_host_api *host, uint32_t code, const char *argument,
                                      const char *field, const char *message) {
    dsr_str none = {NULL, 0};
    dsr_error error;
    error.struct_size = (uint32_t)sizeof error;
    error.code = code;
    error.message = dsr_text_of(message);
    error.op = none;
    error.argument = dsr_text_of(argument);
    error.field = dsr_text_of(field);
    return host->status_new(host->host, &error);
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DSRUN_H */
