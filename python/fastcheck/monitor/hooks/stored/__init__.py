"""What a model stores: parameters, buffers and gradients, read in lists, each before it changes.

Imports ``monitor.session`` and below.
"""
