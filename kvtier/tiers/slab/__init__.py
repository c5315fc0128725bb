"""The disk tier of kind `slab`: one preallocated file of slots and a journal that says what is where."""
