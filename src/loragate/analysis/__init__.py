"""Looking at models and gates: what they cost, what they did, what they would do.

subject        a model with its folder, rows, answers and tasks; what stands in every record
settings       what a diagnosis reads and tries, what a plan is asked; light, for command lines
rows           token ids read by a model, classes of tokens, intervals over rows
supplied       λ from outside: as leaves to differentiate by, or switched off by ΔH while an answer is drawn

delta_entropy  diagnose_entropy: ΔH on rows, and the hard intervention
realised_gates diagnose_gates: λ on generated tokens
interventions  diagnose_interventions: the gates clipped, replaced or taken away
token_traces   diagnose_tokens: a few answers token by token
alignment      diagnose_alignment, on task_values (r), directions (gradients) and theorem (the paper's terms)

inspection     inspect_adapter: what can be gated, and what it costs
counts         a model without weights, counted
plan           make_plan, on plan_step (the memory of a step)
doctor         findings: what is installed here
"""
