"""Every error kvtier raises. Each class is one thing the caller can do about it; all of them pickle."""


class KVTierError(Exception):
    """Base of all errors of this package."""


class InvalidRequest(KVTierError, ValueError):
    """The call or a setting is wrong: fix it. Nothing was done."""


class StoreClosed(KVTierError):
    """The store was closed, or belongs to the parent of this forked process: open a new one."""


class StoreInUse(KVTierError):
    """Another store holds this directory: close it, or choose another directory."""


class IncompatibleStore(KVTierError):
    """The directory holds a store of another format version, or something that is not a store."""


class TierUnavailable(KVTierError):
    """A tier cannot be opened (permissions, free space, missing device): mend that, then open again."""


class UnsupportedModel(KVTierError):
    """This model or cache cannot be restored exactly, so the integration refuses it."""
