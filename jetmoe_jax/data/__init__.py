"""Data: image sources, preprocessing, augmentation, on-device mixing and the Grain loader.

Each module stands alone; nothing is re-exported, so that reading an image does not import JAX.
"""
