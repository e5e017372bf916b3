"""Mixture-of-experts layers: routers, experts and entmax; nothing of images, blocks or devices."""
