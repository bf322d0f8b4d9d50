"""Operations on runs as files: labels, packs, anonymised copies, collecting from other machines."""
