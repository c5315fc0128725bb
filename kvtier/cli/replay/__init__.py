"""`kvtier replay`: what a trace would hit in tiers of given sizes, under given policies."""
