"""The operators in C++: built on request over one torch, and loaded where they were."""
