/* Brings libamdhip64 into the process the way PyTorch does: as a dependency of a library that is
 * itself loaded with RTLD_LOCAL. */
int hipGetLastError(void);
int torch_like_last_error(void) { return hipGetLastError(); }
