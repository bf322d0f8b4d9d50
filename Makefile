# The targets of SFT-Play's guide, thin over erg. Each sets up what it needs (./dev).
# Where there is no GPU the small CPU configurations are trained, and that is said.
.PHONY: help process measure-torch measure-bnb measure-unsloth train-bnb-tb train-unsloth-tb compare

GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
CONFIGS := $(if $(GPU),configs,configs/cpu)
LEDGER := outputs/energy_results.csv
# More options of erg train: make measure-bnb OPTIONS="--repeats 3"
OPTIONS :=

define say
@echo "$(if $(GPU),GPU found: training with $(1),no GPU here: training the small CPU variant $(1))"
endef

help:
	@echo "make process            prepare the data and show what is in it"
	@echo "make measure-torch      fine-tune with plain torch, measured; a row in $(LEDGER)"
	@echo "make measure-bnb        the same with bitsandbytes (4 bit)"
	@echo "make measure-unsloth    the same with Unsloth, in an environment of its own"
	@echo "make train-bnb-tb       measure-bnb, with TensorBoard files beside the adapters"
	@echo "make train-unsloth-tb   measure-unsloth, with TensorBoard files"
	@echo "make compare            the backends in $(LEDGER) against each other; one alone is shown"

process:
	@echo "preparing the data of $(CONFIGS)/run_bnb.yaml"
	./dev process --config $(CONFIGS)/run_bnb.yaml

measure-torch:
	$(call say,$(CONFIGS)/run_torch.yaml)
	./dev train --config $(CONFIGS)/run_torch.yaml $(OPTIONS)

measure-bnb:
	$(call say,$(CONFIGS)/run_bnb.yaml)
	./dev train --config $(CONFIGS)/run_bnb.yaml $(OPTIONS)

measure-unsloth:
	$(call say,$(CONFIGS)/run_unsloth.yaml)
	./dev train-unsloth --config $(CONFIGS)/run_unsloth.yaml $(OPTIONS)

train-bnb-tb:
	$(call say,$(CONFIGS)/run_bnb.yaml)
	./dev train --config $(CONFIGS)/run_bnb.yaml --set train.tensorboard=true $(OPTIONS)

train-unsloth-tb:
	$(call say,$(CONFIGS)/run_unsloth.yaml)
	./dev train-unsloth --config $(CONFIGS)/run_unsloth.yaml --set train.tensorboard=true $(OPTIONS)

compare:
	./dev analyze $(LEDGER)
