"""The disk tier of kind `files`: a file per chunk in a directory that the processes of one host share."""
