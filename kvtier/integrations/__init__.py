"""Adapters from inference libraries to the store. Each imports its library, so none is imported here."""
