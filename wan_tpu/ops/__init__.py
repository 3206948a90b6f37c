"""Operations on one device's arrays and between devices; each picks its implementation by platform."""
