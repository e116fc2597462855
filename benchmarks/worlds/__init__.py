"""Worlds and situations that only benchmarks use: problems on letters, and bases with the adapters to train on them.

tiny_base               trains a base from nothing, the shipped one as well
situations              which base, which demonstrations, how hard they were trained on; in both worlds
commands                the second kind of problem, where an adapter that stops short wants to be extrapolated
command_demonstrations  its rows and documents
"""
