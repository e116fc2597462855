"""Choosing among candidates on held-out evidence, with the untouched adapter always among them.

candidate     a range and an objective to try, or what needs no training
settings      how candidates are asked
trial         one candidate: train, keep, ask; the only place that runs one
store         a study and the files of its trials; what is finished there is never run again
probe         questions with labels, or judged by the adapter's own majority (agreement)
questions     probe questions from files and from rows that were set aside, and whether they are also among other rows
evidence      which questions there are for a choice, or why there are none
recommend     what answers say of all settings, whom to ask next, and what to recommend
comparison    all settings of one adapter on one probe: train, ask, recommend, record; a second probe may veto
outcome       the pick of a sweep (best mean, ties to the adapter), its record, and its cells as rows of an evaluation
transaction   `choose_gates`: train → probe → keep or fall back → write, a few candidates in sequence
chosen        what a choice came to, in sentences
sweep         many candidates over ranges and seeds, in sequence or on Ray (on_ray)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
