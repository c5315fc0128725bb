"""Tiers: where chunks live. Each keeps its own index; the store moves payloads between them."""
