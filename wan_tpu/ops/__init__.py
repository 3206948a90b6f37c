"""Operations on one device's arrays and between devices; each picks its kernel by the platform."""
