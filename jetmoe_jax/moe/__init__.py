"""Mixture-of-experts layers: routers, experts and entmax; nothing about images, blocks or devices."""
