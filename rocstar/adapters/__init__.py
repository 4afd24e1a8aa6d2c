"""Our sandbox, verifier and RoC inside other libraries: one thin file for each, which imports that library.

    rewards.py       the verifier as a reward function of TRL and verl; imports neither
    trl.py           Python as an environment and as a tool of TRL's GRPOTrainer, and a GRPOTrainer with RoC
    verl.py          Python as a tool of verl, and RoC as a filter of its batches
    inspect_ai.py    `sandbox="rocstar"` of an inspect_ai task (inside.py is the code it sends into the sandbox)

Nothing in rocstar imports these. docs/adapters.md lists the tested versions and unsupported features.
"""
