"""Control plane: which key is in which slot, and what leaves next. Pure memory, no locks."""
