"""What `kvtier plan` prints, writes and draws."""
