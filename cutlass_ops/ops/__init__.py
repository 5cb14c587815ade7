"""The operators, in eager mode and of torch.library, with the checks of their arguments and
their gradients.
"""
