"""Looking at models and gates: what they did, what they would do.

settings       what a diagnosis reads and tries; light, for command lines

context        a model with its folder, rows, answers and tasks; what stands in every record
rows           token ids read by a model, classes of tokens, intervals over rows
supplied       λ from outside: as leaves to differentiate by, or switched off by ΔH while an answer is drawn

delta_entropy  diagnose_entropy: ΔH on rows, and the hard intervention
gates          diagnose_gates: λ on generated tokens; diagnose_interventions: λ clipped, replaced or taken away
token_traces   diagnose_tokens: a few answers token by token
directions     action values, and the directions of entropy and of a task value
alignment      diagnose_alignment: the terms of the paper's theorem
"""
