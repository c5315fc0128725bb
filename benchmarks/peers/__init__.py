"""kvtier beside its peers: cold reads of the same bytes on the same device, in the same rounds."""
