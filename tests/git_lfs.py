"""What a clone without Git LFS has in the place of a large file."""

GIT_LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
