"""Swapping at run time: swap files, pinned memory, and the transfers to and from them."""
