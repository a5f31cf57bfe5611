"""Swapping at run time: files, pinned memory and the transfers to and from them."""
