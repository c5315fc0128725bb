"""Replay of request traces through the indexes, policies and rules of the tiers, without payloads."""
